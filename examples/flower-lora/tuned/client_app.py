"""A client: trains the adapters by gradleak's client rule, with a defence where one is named."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from gradleak import flower
from gradleak.audit.cells import defence_of
from tuned.task import examples, recipe, task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    settings, node = context.run_config, context.node_config
    batch = examples(
        int(node["partition-id"]),
        int(node["num-partitions"]),
        int(settings["examples"]),
        int(message.content["config"]["server-round"]),
    )
    if settings["truth"]:  # canaries only: these sentences are the auditor's own
        flower.keep_truth(str(settings["truth"]), message, context, batch)
    defence = defence_of(str(settings["defence"]))
    return flower.train(message, context, task(), batch, recipe(float(settings["lr"])), defence)
