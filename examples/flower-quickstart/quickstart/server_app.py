"""The server, as Flower's tutorials have it, with a tap."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from gradleak.flower import Tap  # 3
from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(fraction_evaluate=0.0)
    strategy = Tap(strategy, rounds=[1], out=str(context.run_config["out"]))  # 4
    arrays = ArrayRecord(Net().state_dict())
    strategy.start(grid, arrays, num_rounds=int(context.run_config["num-server-rounds"]))
