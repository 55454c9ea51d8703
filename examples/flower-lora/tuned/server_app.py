"""The server: FedAvg of adapters, with a tap on what it is sent."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from gradleak import flower
from tuned.task import adapters, network, task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    settings = context.run_config
    strategy = flower.Tap(FedAvg(fraction_evaluate=0.0), out=str(settings["out"]), task=task())
    strategy.start(
        grid,
        initial_arrays=ArrayRecord(adapters(network())),
        num_rounds=int(settings["num-server-rounds"]),
        timeout=float(settings.get("timeout", 600)),
    )
