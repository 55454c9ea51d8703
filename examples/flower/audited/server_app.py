"""The server: FedAvg, with a tap on what it is sent."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from audited.task import network, task
from gradleak import flower

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    strategy = flower.Tap(FedAvg(fraction_evaluate=0.0), out=str(settings["out"]), task=task())
    strategy.start(
        grid,
        initial_arrays=ArrayRecord(network().state_dict()),
        num_rounds=int(settings["num-server-rounds"]),
        timeout=float(settings.get("timeout", 600)),
    )
