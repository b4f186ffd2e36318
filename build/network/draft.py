"""A draft model as a TensorRT network, and the engine that TensorRT builds of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...engines.adaptor import Adaptor, AdaptorError
from ...engines.decoder import Decoder
from ...engines.draft_io import BATCH, POSITIONS, DraftIO, Profile
from .attention import AttentionMaker, native_attention
from .decoder import NetworkDecoder
from .graph import EngineBuildError, Graph
from .quantized import QuantizedLinear
from .visibility import BlockInputs


@dataclass
class DraftNetwork:
    """A network with the builder it belongs to and the graph that keeps its weights alive."""

    io: DraftIO
    graph: Graph
    builder: Any

    @property
    def network(self) -> Any:
        """The `INetworkDefinition`."""
        return self.graph.network

    def builder_config(self) -> Any:
        """A new `IBuilderConfig` with the profiles of the table."""
        config = self.builder.create_builder_config()
        for profile in self.io.profiles:
            config.add_optimization_profile(self._profile(profile))
        return config

    def build(self, config: Any) -> bytes:
        """The serialized engine. Takes seconds to many minutes."""
        plan = self.builder.build_serialized_network(self.network, config)
        if plan is None:
            raise EngineBuildError("TensorRT could not build the engine; its log says why")
        return bytes(plan)

    def _profile(self, profile: Profile) -> Any:
        made = self.builder.create_optimization_profile()
        for tensor in self.io.inputs:
            if {BATCH, POSITIONS} & set(tensor.shape):
                sizes = zip(profile.batch, profile.positions, strict=True)
                made.set_shape(tensor.name, *(tensor.sized(*pair) for pair in sizes))
        return made


def draft_network(
    trt: ModuleType,
    logger: Any,
    io: DraftIO,
    decoder: Decoder,
    adaptor: Adaptor | None = None,
    attention: AttentionMaker | None = None,
    quantized: Mapping[str, QuantizedLinear] | None = None,
) -> DraftNetwork:
    """The network of a draft. Builds nothing yet.

    trt: the module to use, `tensorrt` or `tensorrt_rtx`; logger: one of its loggers. Weights are
    converted to the dtype of `io`. attention: how it attends; None: by TensorRT's own layers.
    quantized: linear layers of the decoder, by name, that are replaced.
    """
    _check(io, decoder, adaptor)
    builder = trt.Builder(logger)
    flags = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    graph = Graph(trt, builder.create_network(flags))
    inputs = {tensor.name: graph.input(tensor) for tensor in io.inputs}
    graph.read_sizes(inputs["ids"])
    block = BlockInputs(*(inputs[name] for name in ("rows", "fed", "ids", "times", "kind")))
    attend = (attention or native_attention(trt))(graph, io, block)
    memory = [tuple(inputs[x.name] for x in io.memory(layer)) for layer in range(io.layers)]
    body = NetworkDecoder(graph, io, decoder, adaptor, block, attend, quantized or {})
    x, new_k, new_v = body.run(memory)
    logits = body.logits(x, inputs["last"])
    top_logits, top_ids = graph.top(logits, io.top)
    found = {"new_k": new_k, "new_v": new_v, "top_ids": top_ids, "top_logits": top_logits}
    for tensor in io.outputs:
        graph.output(tensor, {**found, "logits": logits}[tensor.name])
    return DraftNetwork(io, graph, builder)


def _check(io: DraftIO, decoder: Decoder, adaptor: Adaptor | None) -> None:
    """Refuses what the network would get wrong."""
    config, rule = decoder.config, io.rule
    expected = (config.layers, config.kv_heads, config.head_dim, config.vocab_size)
    if (io.layers, io.kv_heads, io.head_dim, io.vocab_size) != expected:
        raise ValueError(f"{io} is not the table of this decoder; DraftIO.of makes it")
    if (adaptor is None) != (rule.interval == 0):
        raise ValueError(
            "a rule with slots needs an adaptor (copy_adaptor makes one), and one without has none"
        )
    if adaptor is None:
        return
    header = adaptor.config
    if header.low_rank:
        raise AdaptorError(
            f"low_rank is {header.low_rank}; TensorRT engines do not implement low-rank updates "
            "of slot queries and outputs: use the torch engine or an adaptor without them"
        )
    if rule != header.rule(rule.rollback):
        raise AdaptorError(f"the adaptor is for {header.rule(rule.rollback)}, not {rule}")
