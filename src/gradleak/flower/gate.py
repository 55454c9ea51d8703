"""The gate as a client mod: it attacks the trained update on the client, which leaves only if the attacks fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from logging import INFO, WARNING

from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode
from flwr.supercore import log

from gradleak.adapters import from_state_dicts
from gradleak.audit.gate import BLOCK, NOISE, Policy, check
from gradleak.engine import Engine
from gradleak.flower.records import answered, examples_of, extras_of, model_record, params_of, round_of
from gradleak.scenario.defence import Upload
from gradleak.scenario.observation import Knowledge
from gradleak.scenario.task import Batch, Task

HELD_BACK = "This client's gate held its update back."  # the same words whatever the reason: reasons are private


class Gate:
    """A client mod that lets a reply out, adds noise to it, or answers with an error in its place.

        @app.train(mods=[Gate(task, Policy(on_leak="noise"), knows=Knowledge(training=training), batch=of_round)])

    Flower's first mod is the outermost: put the gate first, so that it judges what the others return.

    batch    gives the examples of a message's round. They make the decision sharper and stay on the client. Without
             them noise cannot be judged, and an update that leaks is blocked
    knows    what the server is assumed to know; at least the recipe

    It fails closed: any error blocks. The server learns that an update was held back, but not why; the reason goes to
    this node's log. If noise is added, buffers (BatchNorm statistics) go back as they were sent. Metrics of the reply,
    such as a training loss, are not checked.
    """

    def __init__(
        self,
        task: Task,
        policy: Policy | None = None,
        *,
        knows: Knowledge = Knowledge(),
        batch: Callable[[Message, Context], Batch] | None = None,
        seconds: float = 20.0,
        engine: Engine | None = None,
    ) -> None:
        self.task, self.policy, self.knows = task, policy or Policy(), knows
        self.batch, self.seconds, self.engine = batch, seconds, engine

    def __call__(self, message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
        name, sent = model_record(message.content)  # read before training, which may change the message
        before, extras, number = params_of(sent), extras_of(message.content), round_of(message)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        try:
            back, returned = model_record(reply.content, name)
            examples = examples_of(reply.content)
            observation = from_state_dicts(before, params_of(returned), examples, task=self.task, round=number)
            decision = check(
                self.task,
                replace(observation, extras=extras),
                self.policy,
                knows=self.knows,
                batch=None if self.batch is None else self.batch(message, context),
                seconds=self.seconds,
                engine=self.engine,
            )
            if decision.action == NOISE and decision.update is not None:
                # Without buffers: only the update has noise, so the server gets its own buffers back.
                noised = Upload({"update": decision.update}, examples)
                reply.content[back] = answered(
                    sent, before, observation.weights, noised, observation.buffers or {}, self.task
                )
        except Exception as problem:  # an update that could not be checked does not leave
            log(WARNING, "gate, round %s: blocked, %s: %s", number, type(problem).__name__, problem)
            return _held_back(message)
        log(INFO, "gate, round %s: %s", number, decision)
        return _held_back(message) if decision.action == BLOCK else reply


def _held_back(message: Message) -> Message:
    return Message(Error(code=ErrorCode.MOD_FAILED_PRECONDITION, reason=HELD_BACK), reply_to=message)
