from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor

from lohan.errors import ModelError
from lohan.models.installer import Installer
from lohan.models.skeleton import build_skeleton
from lohan.models.units import find_blocks, partition
from lohan.testing.zoo import NAMES, tiny_model, tiny_model_folder

SPLIT = {
    "llama": ("model.layers", ["model.embed_tokens.weight"], ["model.norm.weight", "lm_head.weight"], []),
    "qwen3": ("model.layers", ["model.embed_tokens.weight"], ["model.norm.weight"], ["model.embed_tokens.weight"]),
    "gemma3": ("model.layers", ["model.embed_tokens.weight"], ["model.norm.weight"], ["model.embed_tokens.weight"]),
    "gpt2": (
        "transformer.h",
        ["transformer.wte.weight", "transformer.wpe.weight"],
        ["transformer.ln_f.weight", "transformer.ln_f.bias"],
        ["transformer.wte.weight"],
    ),
    # OPT registers its final norm before the blocks: only running forward tells that it belongs to the head.
    "opt": (
        "model.decoder.layers",
        ["model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"],
        ["model.decoder.final_layer_norm.weight", "model.decoder.final_layer_norm.bias"],
        ["model.decoder.embed_tokens.weight"],
    ),
    "gpt_neox": (
        "gpt_neox.layers",
        ["gpt_neox.embed_in.weight"],
        ["gpt_neox.final_layer_norm.weight", "gpt_neox.final_layer_norm.bias", "lm_head.weight"],
        [],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)  # experts cannot run on fake fp16
@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_is_cut_where_its_blocks_are(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = build_skeleton(tiny_model_folder(name, tmp_path), compute_dtype=dtype)
    units = partition(model)
    blocks_name, before, after, tied = SPLIT.get(name, SPLIT["llama"])
    assert units.blocks_name == blocks_name
    assert [param.name for param in units.embedding.params] == before
    assert [param.name for param in units.head.params] == after
    assert list(units.tied) == tied
    assert [unit.index for unit in units] == list(range(len(units)))
    assert [unit.name for unit in units.blocks] == [f"{blocks_name}.{i}" for i in range(len(units) - 2)]
    assert {param.name: param.shape for param in units.params} == {
        param_name: tuple(parameter.shape) for param_name, parameter in model.named_parameters()
    }


@pytest.mark.parametrize("name", ["mixtral-router", "gpt2"])
def test_a_real_model_is_cut_like_its_skeleton_and_left_as_it_was(name: str, tmp_path: Path) -> None:
    model = tiny_model(name).train()
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    attributes = {path: dict(module.__dict__) for path, module in model.named_modules()}
    units = partition(model)
    skeleton = build_skeleton(tiny_model_folder(name, tmp_path), compute_dtype=torch.float32)
    assert partition(skeleton) == units
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())
    assert all(buffer is buffers[key] for key, buffer in model.named_buffers())
    assert all(attributes[path] == module.__dict__ for path, module in model.named_modules())
    assert all(module.training for module in model.modules())


def test_word_projections_of_opt_are_found_on_their_own_side() -> None:
    units = partition(tiny_model("opt", word_embed_proj_dim=32))
    assert "model.decoder.project_in.weight" in {param.name for param in units.embedding.params}
    assert "model.decoder.project_out.weight" in {param.name for param in units.head.params}


def test_places_name_every_holder_of_a_tied_tensor() -> None:
    embedding = partition(tiny_model("qwen3")).embedding.params[0]
    assert embedding.places == (("model.embed_tokens", "weight"), ("lm_head", "weight"))


def test_frozen_parameters_are_known_as_frozen() -> None:
    model = tiny_model("llama")
    model.model.embed_tokens.requires_grad_(False)
    units = partition(model)
    assert [param.name for param in units.params if not param.trainable] == ["model.embed_tokens.weight"]


class Block(nn.Module):
    def __init__(self, width: int = 8):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.dense = nn.Linear(width, width)

    def forward(self, hidden: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + self.dense(self.norm(hidden)) * scale, hidden.mean()


class Plain(nn.Module):
    """A model of no library: several outputs per block, an argument made outside, an unused parameter."""

    def __init__(self, num_blocks: int = 3, answer: str = "object"):
        super().__init__()
        self.answer = answer
        self.tokens = nn.Embedding(10, 8)
        self.unused = nn.Parameter(torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(8))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 10, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        hidden = self.tokens(input_ids)
        scale = self.scale * 2
        for block in self.blocks:
            hidden, _ = block(hidden, scale)
        logits = self.head(self.norm(hidden))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        answers = {"object": SimpleNamespace(loss=loss), "dict": {"loss": loss}, "tuple": (loss, logits)}
        return answers[self.answer]


@pytest.mark.parametrize("answer", ["object", "dict", "tuple"])
def test_a_model_of_no_library_is_cut_too(answer: str) -> None:
    units = partition(Plain(answer=answer))
    assert [param.name for param in units.embedding.params] == ["scale", "tokens.weight"]
    assert [param.name for param in units.head.params] == ["unused", "norm.weight", "norm.bias", "head.weight"]
    assert [len(unit.params) for unit in units.blocks] == [4, 4, 4]


def test_example_inputs_serve_a_forward_with_other_arguments() -> None:
    class Other(Plain):
        def forward(self, *, words: Tensor, weight: float) -> Tensor:  # type: ignore[override]
            return super().forward(words, words).loss * weight

    with pytest.raises(ModelError, match="Pass example_inputs"):
        partition(Other())
    inputs = {"words": torch.zeros(2, 4, dtype=torch.int64), "weight": 2.0}
    assert partition(Other(), example_inputs=inputs).head.params[-1].name == "head.weight"


def test_blocks_are_the_list_with_most_parameters_or_the_one_named() -> None:
    model = Plain()
    model.small = nn.ModuleList([nn.Linear(2, 2)])
    assert find_blocks(model)[0] == "blocks"
    assert find_blocks(model, "small") == ("small", model.small)
    with pytest.raises(ModelError, match=r"no ModuleList called 'block' in Plain\.\nIt has blocks, small\."):
        find_blocks(model, "block")


def test_a_list_of_lists_is_not_a_list_of_blocks() -> None:
    model = nn.Module()
    model.stages = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleList([nn.Linear(4, 4)])])
    assert find_blocks(model)[0] == "stages.1"


def refused(model: nn.Module, message: str, **options: object) -> None:
    parameters = dict(model.named_parameters())
    with pytest.raises(ModelError, match=message):
        partition(model, **options)
    assert all(parameter is parameters[key] for key, parameter in model.named_parameters())


def test_two_equal_lists_have_to_be_named() -> None:
    model = Plain()
    model.more = nn.ModuleList(Block() for _ in range(3))
    refused(model, "2 block lists of 264 parameters each: blocks, more")


def test_no_list_and_an_empty_list_are_refused() -> None:
    refused(nn.Sequential(nn.Linear(2, 2)), "Sequential has no ModuleList of blocks")
    refused(Plain(num_blocks=0), "blocks is empty")


def test_the_same_block_twice_is_refused() -> None:
    model = Plain()
    model.blocks[2] = model.blocks[0]
    refused(model, r"blocks\.2 is the same block as blocks\.0")


def test_a_module_shared_by_two_blocks_is_refused() -> None:
    model = Plain()
    model.blocks[2].dense = model.blocks[0].dense
    refused(model, r"blocks\.2\.dense is the same module as blocks\.0\.dense")


def test_a_parameter_shared_by_two_blocks_is_refused() -> None:
    model = Plain()
    model.blocks[2].dense.weight = model.blocks[0].dense.weight
    refused(model, r"shared by blocks\.0 and blocks\.2: blocks\.0\.dense\.weight, blocks\.2\.dense\.weight")


def test_a_parameter_shared_by_a_block_and_the_head_is_refused() -> None:
    model = Plain()
    model.norm.weight = model.blocks[1].norm.weight
    refused(model, r"shared by blocks\.1 and a module outside the blocks: blocks\.1\.norm\.weight, norm\.weight")


def test_compiled_blocks_are_refused() -> None:
    model = Plain()
    model.blocks[1] = torch.compile(model.blocks[1])
    refused(model, r"blocks\.1 is compiled with torch\.compile")
    model = Plain()
    model.blocks[2].compile()
    refused(model, r"blocks\.2 is compiled with torch\.compile")


def test_a_recurrent_layer_is_refused() -> None:
    model = Plain()
    model.memory = nn.LSTM(8, 8)
    refused(model, r"memory is an nn\.LSTM")


class Reordered(Plain):
    order = (0, 1, 2)

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        hidden = self.tokens(input_ids)
        for index in self.order:
            hidden, _ = self.blocks[index](hidden, self.scale)
        return {"loss": self.head(self.norm(hidden)).mean()}


@pytest.mark.parametrize(
    ("order", "message"),
    [
        ((0, 2, 1), "called in the order 0, 2, 1"),
        ((0, 1, 2, 1), r"blocks\.1 is called 2 times"),
        ((0, 2), r"blocks\.1 is called 0 times"),
    ],
)
def test_blocks_not_called_once_and_in_order_are_refused(order: tuple[int, ...], message: str) -> None:
    model = Reordered()
    model.order = order
    refused(model, message)


def test_a_parameter_used_between_blocks_is_refused() -> None:
    class Between(Plain):
        def forward(self, input_ids: Tensor, labels: Tensor) -> object:
            hidden = self.tokens(input_ids)
            for block in self.blocks:
                hidden, _ = block(hidden * self.scale, hidden)
            return {"loss": self.head(hidden).mean()}

    refused(Between(), "scale is used between blocks: after 1 of the blocks")


def test_a_parameter_handed_to_every_block_as_it_is_is_refused() -> None:
    class Handing(Plain):
        def forward(self, input_ids: Tensor, labels: Tensor) -> object:
            hidden = self.tokens(input_ids)
            for block in self.blocks:
                hidden, _ = block(hidden, scale=self.scale)
            return {"loss": self.head(hidden).mean()}

    refused(Handing(), "scale is used between blocks: after 1 of the blocks")


def test_a_block_that_uses_a_parameter_of_another_is_refused() -> None:
    model = Plain()
    model.blocks[0].__dict__["hidden_reference"] = model.norm
    model.blocks[0].forward = lambda hidden, scale: (model.blocks[0].hidden_reference(hidden), hidden)
    refused(model, r"norm\.(weight|bias) is used inside blocks\.0, which does not hold it")


def test_a_block_whose_parameter_is_used_outside_is_refused() -> None:
    class Reaching(Plain):
        def forward(self, input_ids: Tensor, labels: Tensor) -> object:
            out = super().forward(input_ids, labels)
            return {"loss": out.loss + self.blocks[1].dense.bias.sum()}

    refused(Reaching(), r"blocks\.1\.dense\.bias belongs to blocks\.1 and is used outside of it")


class Stubborn(Plain):
    """Cannot run without data: it asks for a value."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> object:
        if int(input_ids.sum()) > 5:
            return {}
        return super().forward(input_ids, labels)


def test_names_decide_when_forward_cannot_be_tried() -> None:
    model = Stubborn()
    del model.scale, model.unused
    model.head.weight = model.tokens.weight
    units = partition(model)
    assert [param.name for param in units.embedding.params] == ["tokens.weight"]
    assert [param.name for param in units.head.params] == ["norm.weight", "norm.bias"]
    assert units.tied == ("tokens.weight",)


def test_names_that_do_not_tell_are_refused() -> None:
    refused(Stubborn(), "It is not known whether unused is used before the first block or after the last")


def test_a_block_that_cannot_run_without_data_is_stood_in_for() -> None:
    class Choosy(Block):
        def forward(self, hidden: Tensor, scale: Tensor) -> tuple[Tensor]:
            return (super().forward(hidden, scale)[0] if hidden.sum() > 0 else hidden,)

    class Model(Plain):
        def forward(self, input_ids: Tensor, labels: Tensor) -> object:
            hidden, scale = self.tokens(input_ids), self.scale * 2
            for block in self.blocks:
                (hidden,) = block(hidden, scale)
            return {"loss": self.head(self.norm(hidden)).mean()}

    model = Model()
    model.blocks = nn.ModuleList(Choosy() for _ in range(2))
    units = partition(model)
    assert [param.name for param in units.embedding.params] == ["scale", "tokens.weight"]


def test_a_table_cached_during_the_run_does_not_stay_behind() -> None:
    class Caching(Plain):
        def forward(self, input_ids: Tensor, labels: Tensor) -> object:
            self.cached = torch.arange(8) * 2.0
            self.register_buffer("table", torch.arange(8) * 3.0)
            return super().forward(input_ids, labels)

    model = Caching()
    partition(model)
    assert not hasattr(model, "cached")
    assert not dict(model.named_buffers())
    assert not any(isinstance(value, FakeTensor) for module in model.modules() for value in vars(module).values())


def test_installed_tensors_are_what_forward_uses() -> None:
    real = tiny_model("qwen3").eval()
    hollow = tiny_model("qwen3", seed=1).eval().to("meta")
    hollow.model.rotary_emb = real.model.rotary_emb
    hollow.tie_weights()
    units = partition(hollow)
    originals = dict(hollow.named_parameters(remove_duplicate=False))
    weights = {name: parameter.detach() for name, parameter in real.named_parameters()}
    ids = torch.arange(6)[None]
    with Installer(hollow, units) as installer, torch.no_grad():
        for unit in units:
            installer.install(unit, {param.name: weights[param.name] for param in unit.params})
        assert hollow.lm_head.weight is weights["model.embed_tokens.weight"]
        assert torch.equal(hollow(input_ids=ids).logits, real(input_ids=ids).logits)
        installer.uninstall(units.blocks[0])
        installer.uninstall(units.blocks[0])
        assert hollow.model.layers[0].mlp.up_proj.weight.is_meta
        assert installer.installed == weights.keys() - {param.name for param in units.blocks[0].params}
    assert all(parameter is originals[key] for key, parameter in hollow.named_parameters(remove_duplicate=False))


def test_everything_is_taken_out_when_the_context_fails() -> None:
    model = Plain()
    units = partition(model)
    original = model.head.weight

    def fail_inside() -> None:
        with Installer(model, units) as installer:
            installer.install(units.head, {param.name: torch.zeros(param.shape) for param in units.head.params})
            installer.install_param("tokens.weight", torch.zeros(10, 8))
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_inside()
    assert model.head.weight is original


def test_a_wrong_shape_or_name_installs_nothing() -> None:
    model = Plain()
    units = partition(model)
    installer = Installer(model, units)
    tensors = {param.name: torch.zeros(param.shape) for param in units.head.params}
    with pytest.raises(ValueError, match=r"head\.weight has shape \[10, 8\] and was given \[3\]"):
        installer.install(units.head, tensors | {"head.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match="unit head holds"):
        installer.install(units.head, {"norm.weight": torch.zeros(8)})
    assert not installer.installed


def test_what_a_model_does_only_outside_training_does_not_count() -> None:
    class Rescaling(Plain):
        """RWKV divides weights of its blocks when it is not training."""

        def forward(self, input_ids: Tensor, labels: Tensor) -> object:
            if not self.training:
                self.blocks[0].dense.weight.div_(2)
            return super().forward(input_ids, labels)

    assert len(partition(Rescaling().eval())) == 5


def test_blocks_dropped_at_random_are_taken_as_all_there() -> None:
    assert len(partition(tiny_model("opt", layerdrop=0.5).train())) == 5
