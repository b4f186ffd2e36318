"""A stand-in for the loop model in tests of clients: it repeats the words of the prompt.

One word (or id + 1) per 10 ms until `max_tokens`, with the loop's errors, cancellation and
statistics. Some prompts ask for something else: `#state` answers how many requests run and how
many were cancelled, `#late` fails after a first response, `#silent` never answers.
"""

import asyncio
import json

import numpy as np
import triton_python_backend_utils as pb_utils

WORD_S = 0.01
FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self.running = 0
        self.cancelled = 0

    async def execute(self, requests):
        await asyncio.gather(*(self.answer(request) for request in requests))

    async def answer(self, request):
        sender = request.get_response_sender()
        self.running += 1
        try:
            await self.respond(request, sender)
        except ValueError as error:
            refused = pb_utils.TritonError(
                f"INVALID_ARGUMENT: {error}", pb_utils.TritonError.INVALID_ARG
            )
            sender.send(pb_utils.InferenceResponse(error=refused), flags=FINAL)
        except Exception as error:
            failed = pb_utils.TritonError(repr(error))
            sender.send(pb_utils.InferenceResponse(error=failed), flags=FINAL)
        finally:
            self.running -= 1

    async def respond(self, request, sender):
        count = int(value(request, "max_tokens"))
        if count < 1:
            raise ValueError(f"max_tokens is {count}, at least 1 is needed")
        prompt = value(request, "text_input")
        if prompt == b"#state":
            state = json.dumps({"running": self.running - 1, "cancelled": self.cancelled})
            sender.send(pb_utils.InferenceResponse([text(state)]), flags=FINAL)
            return
        await self.repeat(request, sender, parts(request, count), prompt)

    async def repeat(self, request, sender, words, prompt):
        streamed, sent = bool(value(request, "stream")) and prompt != b"#silent", 0
        for count in range(1, len(words) + 1):
            await asyncio.sleep(WORD_S)
            if count > 1 and request.is_cancelled():
                self.cancelled += 1
                sender.send(flags=FINAL)
                return
            if streamed and count < len(words):
                sender.send(pb_utils.InferenceResponse(outputs(words[:count], sent)))
                sent = count
            if prompt == b"#late":
                raise ValueError("this came late")
        last = [*outputs(words, sent), text(statistics(len(words)), "statistics")]
        sender.send(pb_utils.InferenceResponse(last), flags=FINAL)


def value(request, name):
    """The first element of an input, None where it is absent."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)[0]


def parts(request, count):
    """The words or ids to answer with."""
    prompt = value(request, "text_input")
    if prompt is not None:
        words = [f"{word} " for word in prompt.decode().split()]
    else:
        given = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy()
        words = [int(token) + 1 for token in given.reshape(-1)]
    return [words[index % len(words)] for index in range(count)]


def outputs(words, sent):
    if isinstance(words[0], str):
        return [text("".join(words[sent:]))]
    return [
        pb_utils.Tensor("output_ids", np.array([[words]], np.int32)),
        pb_utils.Tensor("sequence_length", np.array([[len(words)]], np.int32)),
        pb_utils.Tensor("emitted_length", np.array([[sent]], np.int32)),
    ]


def text(content, name="text_output"):
    return pb_utils.Tensor(name, np.array([[content.encode()]], np.object_))


def statistics(count):
    times = dict.fromkeys(("prefill_ms", "draft_ms", "verify_ms", "host_ms"), 1.0)
    zeros = dict.fromkeys(("rollbacks", "slots_materialized", "slots_discarded"), 0)
    drafts = {"drafted": 4, "accepted": 2, "drafted_at": [2, 2], "accepted_at": [1, 1]}
    ending = {"draft_failures": 0, "finish_reason": "length"}
    tokens = {"prefix_tokens": 7, "new_tokens": count, "iterations": count}
    return json.dumps(tokens | drafts | times | zeros | ending)
