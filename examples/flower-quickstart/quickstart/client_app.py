"""The client, as Flower's tutorials have it; unchanged."""

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart.task import Net, load_data
from quickstart.task import train as train_fn

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    net = Net()
    net.load_state_dict(message.content["arrays"].to_torch_state_dict())
    torch.manual_seed(int(context.node_config["partition-id"]))
    loader = load_data(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    loss = train_fn(net, loader, int(context.run_config["local-epochs"]), float(context.run_config["lr"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    return Message(RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics}), reply_to=message)
