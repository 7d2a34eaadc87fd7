"""Models by name: the published GPT shapes and today's open models, as profiles worked out on paper.

FLOPs count two per multiply and add of every matrix product; attention counts the half below the diagonal as well, as
the usual formulas do, and with a window only the window. Bytes are those of the outputs, with attention that never
stores its scores (flash). Experts see their expected share of the tokens, evenly spread.

Shapes are numbers from the models' public config.json (see preset_shapes.py). Pure: no torch, no files.
"""

from __future__ import annotations

from dataclasses import dataclass

from lohan.errors import ConfigError
from lohan.profiles import ModelProfile, OperatorProfile, UnitProfile


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A decoder-only transformer, as far as sizes go."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    gated: bool = True
    """Two matrices up (gate and value), as SwiGLU and GeGLU have; False for a plain MLP."""

    biases: bool = False
    """On every linear layer, and norms that have a bias too."""

    tied: bool = False
    positions: int = 0
    """Learned position embeddings; 0 where positions are rotated in."""

    experts: int = 0
    experts_per_token: int = 0
    window: int = 0
    """Of sliding attention; 0 for full."""

    full_attention_every: int = 1
    """Every how many layers attention is full although there is a window."""

    norms_per_block: int = 2
    query_norm: bool = False
    """Norms on queries and keys, one weight per head element."""

    sinks: bool = False
    """A learned logit per head beside the attention's scores."""

    sequence: int = 4096
    """What an estimate takes if nobody says otherwise."""

    @property
    def query(self) -> int:
        return self.heads * self.head_size

    @property
    def key_value(self) -> int:
        return 2 * self.kv_heads * self.head_size

    @property
    def up(self) -> int:
        return (2 if self.gated else 1) * self.intermediate


def gpt(layers: int, heads: int, hidden: int) -> Shape:
    """A GPT as in the published runs: vocabulary 50257, 1024 learned positions, four times as wide inside, tied."""
    return Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_size=hidden // heads, intermediate=4 * hidden,
        vocabulary=50257, gated=False, biases=True, tied=True, positions=1024, sequence=1024,
    )  # fmt: skip


def find_preset(name: str) -> Shape:
    """The shape of a preset; ConfigError with the names that are known."""
    from lohan.preset_shapes import SHAPES

    try:
        return SHAPES[name.lower()]
    except KeyError:
        raise ConfigError(f"There is no preset {name!r}. Known are: {', '.join(SHAPES)}.") from None


def preset_profile(
    name: str, *, micro_batch_size: int = 1, sequence_length: int | None = None, compute_bytes: int = 2
) -> ModelProfile:
    """A preset at a micro-batch size."""
    shape = find_preset(name)
    return profile_shape(
        shape, name=name, micro_batch_size=micro_batch_size, sequence_length=sequence_length or shape.sequence,
        compute_bytes=compute_bytes,
    )  # fmt: skip


def profile_shape(
    shape: Shape, *, name: str, micro_batch_size: int, sequence_length: int, compute_bytes: int = 2
) -> ModelProfile:
    """Parameters, FLOPs and bytes of every operator of every unit."""
    tokens = micro_batch_size * sequence_length
    full = _block(shape, tokens, sequence_length, compute_bytes)
    windowed = full
    if shape.window:
        windowed = _block(shape, tokens, min(sequence_length, shape.window), compute_bytes)
    every = max(shape.full_attention_every, 1)
    blocks = tuple(full if (layer + 1) % every == 0 and every > 1 else windowed for layer in range(shape.layers))
    notes: tuple[str, ...] = ()
    if shape.experts:
        share = tokens * shape.experts_per_token / shape.experts
        notes = (f"each of {shape.experts} experts is taken to see {share:.0f} tokens of a micro-batch",)
    return ModelProfile(
        name=name,
        units=(_embedding(shape, tokens, compute_bytes), *blocks, _head(shape, tokens, compute_bytes)),
        tied=shape.tied,
        hidden_size=shape.hidden,
        vocabulary=shape.vocabulary,
        sequence_length=sequence_length,
        micro_batch_size=micro_batch_size,
        compute_bytes=compute_bytes,
        notes=notes,
    )


def _embedding(shape: Shape, tokens: int, compute_bytes: int) -> UnitProfile:
    tensors = [shape.vocabulary * shape.hidden] + ([shape.positions * shape.hidden] if shape.positions else [])
    return UnitProfile(
        kind="embedding",
        num_parameters=sum(tensors),
        tensor_elements=tuple(tensors),
        forward_flops=0.0,
        input_bytes=8 * tokens,
        saved_bytes=8 * tokens,
        working_bytes=8 * tokens + tokens * shape.hidden * compute_bytes,
    )


def _head(shape: Shape, tokens: int, compute_bytes: int) -> UnitProfile:
    norm = shape.hidden * (2 if shape.biases and not shape.experts else 1)
    tensors = [norm] if shape.tied else [norm, shape.vocabulary * shape.hidden]
    logits = tokens * shape.vocabulary
    return UnitProfile(
        kind="head",
        num_parameters=sum(tensors),
        tensor_elements=tuple(tensors),
        forward_flops=2.0 * logits * shape.hidden,
        input_bytes=tokens * shape.hidden * compute_bytes,
        saved_bytes=tokens * shape.hidden * compute_bytes + logits * compute_bytes,
        working_bytes=2 * tokens * shape.hidden * compute_bytes + logits * (compute_bytes + 4),
    )


def _block(shape: Shape, tokens: int, attended: int, compute_bytes: int) -> UnitProfile:
    h = shape.hidden
    width = shape.query + shape.key_value

    def out(elements: int) -> int:
        return tokens * elements * compute_bytes

    routed = shape.experts_per_token or 1
    operators = (
        OperatorProfile(name="qkv", flops=2.0 * tokens * h * width, output_bytes=out(width), needed=True),
        OperatorProfile(
            name="attention", flops=4.0 * tokens * attended * shape.query,
            output_bytes=out(shape.query) + 4 * tokens * shape.heads, needed=True, inputs=(0,),
        ),
        OperatorProfile(
            name="proj", flops=2.0 * tokens * shape.query * h, output_bytes=out(h), needed=True, inputs=(1,)
        ),
        OperatorProfile(
            name="up", flops=2.0 * tokens * h * shape.up * routed, output_bytes=out(shape.up * routed), needed=True,
            inputs=(2,),
        ),
        # Its value only goes into the sum that is the next block's input, and that one is kept.
        OperatorProfile(
            name="down", flops=2.0 * tokens * shape.intermediate * h * routed, output_bytes=out(h * routed),
            needed=shape.experts > 0, inputs=(3,),
        ),
    )  # fmt: skip
    tensors = _block_tensors(shape)
    router = 2.0 * tokens * h * shape.experts
    # Two norms' outputs, the attention's inputs and output, the sum after it, both sides of the activation function.
    inside = 2 * h + width + shape.query + h + (shape.up + (2 if shape.gated else 1) * shape.intermediate) * routed
    return UnitProfile(
        kind="block",
        num_parameters=sum(tensors),
        tensor_elements=tensors,
        forward_flops=sum(operator.flops for operator in operators) + router,
        input_bytes=out(h),
        operators=operators,
        saved_bytes=out(inside),
        working_bytes=out(inside) + 2 * out(max(shape.up * routed, width, h)),
    )


def _block_tensors(shape: Shape) -> tuple[int, ...]:
    h = shape.hidden
    width = shape.query + shape.key_value
    tensors = [h * width, shape.query * h]
    if shape.experts:
        tensors += [h * shape.experts]
    tensors += [h * shape.up, shape.intermediate * h] * max(shape.experts, 1)
    if shape.biases:
        tensors += [width, h]
        tensors += [shape.up, h] * max(shape.experts, 1) + [shape.experts] * bool(shape.experts)
    if shape.sinks:
        tensors += [shape.heads]
    tensors += [h * (2 if shape.biases and not shape.experts else 1)] * shape.norms_per_block
    if shape.query_norm:
        tensors += [shape.head_size] * 2
    return tuple(tensors)
