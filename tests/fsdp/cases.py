"""The configurations of FSDP2 that tide serves, by name."""

from __future__ import annotations

from typing import Any

import models
import torch
from models import Block, ExpertModel, Many, Model, Skipping, Small
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from trial import TORCH, Case, Setting, Trainer

MASTERS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def by_block(model: Any, setting: Setting, mesh: Any = None, **keywords: Any) -> None:
    mesh = mesh or setting.mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **keywords)
    fully_shard(model, mesh=mesh, **keywords)


def whole(model: nn.Module, setting: Setting) -> None:
    fully_shard(model, mesh=setting.mesh())


def masters(model: Any, setting: Setting) -> None:
    by_block(model, setting, mp_policy=MASTERS)


def two_by_two(model: Any, setting: Setting, **keywords: Any) -> None:
    by_block(model, setting, setting.mesh(2, 2, names=("replicate", "shard")), **keywords)


def columns(model: Any, setting: Setting) -> None:
    """Shard(1) wherever it divides; the rest by rows."""

    def place(parameter: nn.Parameter) -> Shard:
        divides = parameter.ndim > 1 and parameter.shape[1] % 4 == 0
        return Shard(1) if divides else Shard(0)

    by_block(model, setting, shard_placement_fn=place)


def frozen(model: Any, setting: Setting) -> None:
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    if TORCH >= (2, 14):  # stock of older ones refuses integers
        table = nn.Parameter(torch.arange(9, dtype=torch.uint8), requires_grad=False)
        model.blocks[2].register_parameter("table", table)
    by_block(model, setting)


def unfreeze_later(trainer: Trainer, index: int) -> torch.Tensor:
    """Everything frozen in the first forward, trained afterwards."""
    trainer.model.requires_grad_(index > 0)
    if index == 0:
        return models.loss_of(trainer.model, trainer.words())
    loss = trainer.backward()
    trainer.update()
    return loss


def tied(model: Any, setting: Setting) -> None:
    mesh = setting.mesh()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard([model.embedding, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)


def nested(model: Any, setting: Setting) -> None:
    mesh = setting.mesh()
    for block in model.blocks:
        fully_shard(block.up, mesh=mesh)
        fully_shard(block.down, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def several_modules(model: Any, setting: Setting) -> None:
    mesh = setting.mesh()
    blocks = list(model.blocks)
    fully_shard(blocks[:2], mesh=mesh)
    fully_shard(blocks[2:], mesh=mesh)
    fully_shard(model, mesh=mesh)


def expert_mesh(model: Any, setting: Setting) -> None:
    """Experts are sharded over pairs of ranks and replicated over pairs, the rest over all."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import (
        FSDPMeshInfo,
        HSDPMeshInfo,
        ShardPlacementResult,
    )

    dense = setting.mesh()
    pairs = setting.mesh(2, 2, names=("replicate", "expert"))
    over_all = FSDPMeshInfo(dense, shard_mesh_dim=0)
    over_pairs = HSDPMeshInfo(pairs, shard_mesh_dim=1, replicate_mesh_dim=0)

    def place(parameter: nn.Parameter) -> Any:
        if parameter.shape == (24, models.WIDTH) and parameter.ndim == 2:
            return ShardPlacementResult(placement=Shard(0), mesh_info=over_pairs)
        return ShardPlacementResult(placement=Shard(0), mesh_info=over_all)

    for block in model.blocks:
        fully_shard(block, mesh=dense, shard_placement_fn=place)
    fully_shard(model, mesh=dense)


def tensor_parallel(model: Any, setting: Setting) -> None:
    mesh = setting.mesh(2, 2, names=("shard", "tensor"))
    for block in model.blocks:
        parallelize_module(
            block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
    by_block(model, setting, mesh["shard"])


def sequence_parallel(model: Any, setting: Setting) -> None:
    """Gradients of the norms are summed over the tensor mesh before they get here."""
    mesh = setting.mesh(2, 2, names=("shard", "tensor"))
    for block in model.blocks:
        styles = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh["tensor"], styles)
    by_block(model, setting, mesh["shard"])


def prefetching(model: Any, setting: Setting) -> None:
    by_block(model, setting)
    blocks = list(model.blocks)
    for index, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
        block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])


def checkpointed(model: Any, setting: Setting) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    by_block(model, setting)


def compiled(model: Any, setting: Setting) -> None:
    by_block(model, setting)
    for block in model.blocks:
        block.compile(backend="aot_eager")


def separate_group(model: Any, setting: Setting) -> None:
    """Reductions over a process group of their own, as set_separate_reduce_scatter_group makes
    it."""
    by_block(model, setting)
    group = setting.group()
    for module in (model, *model.blocks):
        for shard_group in module._get_fsdp_state()._fsdp_param_groups:
            shard_group.mesh_info.reduce_scatter_process_group = group


def mixed_dtypes(model: Any, setting: Setting) -> None:
    """Norms and biases stay fp32, matrices are gathered in bf16: one group, two dtypes."""
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        cast_forward_inputs=False,
        param_dtype_override_fn=lambda p: torch.bfloat16 if p.ndim > 1 else torch.float32,
    )
    by_block(model, setting, mp_policy=policy)


class MixedModel(Model):
    """Casts by hand, as its matrices are bf16 and its vectors fp32."""

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x.to(self.head.weight.dtype))


class MixedBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x.float()).to(self.up.weight.dtype)
        y = torch.relu(y @ self.up.weight.t() + self.up.bias)
        y = y.to(self.down.weight.dtype) @ self.down.weight.t() + self.down.bias
        return x + self.scale * y


def mixed_model() -> nn.Module:
    model = MixedModel(blocks=0)
    model.blocks.extend(MixedBlock() for _ in range(3))
    return model


# Steps.


def accumulate(sync: Any) -> Any:
    """Three backwards a step; `sync(model, last)` says what to switch before each."""

    def step(trainer: Trainer, index: int) -> torch.Tensor:
        losses = []
        for micro in range(3):
            sync(trainer.model, micro == 2)
            losses.append(trainer.backward())
        trainer.update()
        return torch.stack(losses).sum()

    return step


def without_sync(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def without_all_reduce(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


def pipeline_like(model: Any, last: bool) -> None:
    model.set_is_last_backward(last)
    model.set_reshard_after_backward(last)
    model.set_requires_gradient_sync(last)


def clipping(trainer: Trainer, index: int) -> torch.Tensor:
    loss = trainer.backward()
    norm = torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.3)
    trainer.update()
    return loss + norm.full_tensor()


def evaluating(trainer: Trainer, index: int) -> torch.Tensor:
    """Evaluation between steps: without gradients, and in inference mode."""
    loss = plain(trainer, index)
    trainer.model.eval()
    with torch.no_grad():
        first = models.loss_of(trainer.model, trainer.words())
    with torch.inference_mode():
        second = models.loss_of(trainer.model, trainer.words())
    trainer.model.train()
    for module in (trainer.model, *trainer.model.blocks):
        module.reshard()
    return loss + first + second.clone()


def plain(trainer: Trainer, index: int) -> torch.Tensor:
    loss = trainer.backward()
    trainer.update()
    return loss


def conditional(trainer: Trainer, index: int) -> torch.Tensor:
    """Every second step leaves out block 1, and one bias of block 2 has no gradient."""
    model: Any = trainer.model
    model.skip = index % 2 == 1
    model.blocks[2].down.bias.requires_grad_(index % 2 == 0)
    return plain(trainer, index)


def finalizing(trainer: Trainer, index: int) -> torch.Tensor:
    """Two backwards whose end the caller decides."""
    model: Any = trainer.model
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    loss = trainer.backward()
    model.set_requires_gradient_sync(True)
    loss = loss + trainer.backward()
    model.finalize_backward()
    trainer.update()
    return loss


class BackwardOptimizer:
    """Steps each parameter's own optimizer as soon as its gradient is there."""

    def __init__(self, model: nn.Module) -> None:
        self.own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
        for parameter in self.own:
            parameter.register_post_accumulate_grad_hook(self._step)

    def _step(self, parameter: torch.Tensor) -> None:
        self.own[parameter].step()
        self.own[parameter].zero_grad()

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


def keep_storage(model: Any) -> None:
    model.set_keep_unsharded_storage(True)


def divided(factor: float) -> Any:
    """Premultiplied sums, which gloo lacks where the factor is not the number of ranks: there it
    adds, then divides."""

    def shard(model: Any, setting: Setting) -> None:
        masters(model, setting)
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(factor)
            module.set_force_sum_reduction_for_comms(setting.engine == "stock")

    return shard


def async_unshard(model: Any) -> None:
    model._set_unshard_async_op(True)


def head_start(model: Any) -> None:
    """Rare switches: more gradients in flight, zeros for unused parameters, an embedding that its
    backward does not need."""
    model.set_reduce_scatter_max_input_buffers(3)
    model.set_reduce_scatter_unused_params(True)
    model.embedding.set_unshard_in_backward(False)


def by_block_and_embedding(model: Any, setting: Setting) -> None:
    mesh = setting.mesh()
    fully_shard(model.embedding, mesh=mesh)
    by_block(model, setting, mesh)


def forced_sums(model: Any) -> None:
    for module in (model, *model.blocks):
        module.set_force_sum_reduction_for_comms(True)


def hooked(model: Any) -> None:
    for module in (model, *model.blocks):
        module.set_all_reduce_hook(lambda output: output.mul_(0.5))


def bf16(build: Any) -> Any:
    return lambda: build().to(torch.bfloat16)


def fp16_reduction(model: Any, setting: Setting) -> None:
    by_block(
        model,
        setting,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16),
    )


def bf16_with_fp32_gradients() -> nn.Module:
    model = Model().to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return model


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def reshard(value: Any) -> Any:
    return lambda m, s: by_block(m, s, reshard_after_forward=value)


CASES: dict[str, Case] = {
    "fp32": Case(Model, by_block),
    "bf16": Case(bf16(Model), by_block),
    "masters": Case(Model, masters),
    "two_ranks": Case(Model, masters, ranks=2),
    "three_ranks": Case(Model, by_block, ranks=3),
    "few_rows": Case(Small, whole),
    "columns": Case(lambda: Model(hidden=36), columns),
    "columns_bf16": Case(bf16(lambda: Model(hidden=36)), columns),
    "frozen": Case(Model, frozen),
    "unfrozen_later": Case(Model, masters, step=unfreeze_later, since=(2, 14)),
    "many_parameters": Case(Many, whole),
    "tied": Case(lambda: Model(tied=True), tied),
    "tied_in_root": Case(lambda: Model(tied=True), by_block),
    "nested": Case(Model, nested),
    "several_modules": Case(Model, several_modules),
    "hsdp": Case(Model, two_by_two),
    "hsdp_masters": Case(Model, lambda m, s: two_by_two(m, s, mp_policy=MASTERS)),
    "hsdp_accumulation": Case(
        Model,
        lambda m, s: two_by_two(m, s, mp_policy=MASTERS),
        step=accumulate(without_all_reduce),
    ),
    "accumulation": Case(Model, masters, step=accumulate(lambda m, last: None)),
    "accumulation_without_sync": Case(Model, masters, step=accumulate(without_sync)),
    "accumulation_bf16": Case(bf16(Model), by_block, step=accumulate(without_sync)),
    "stays_unsharded": Case(Model, reshard(False)),
    "root_reshards": Case(Model, reshard(True)),
    "smaller_mesh": Case(Model, reshard(2), calls_served=False),
    "prefetch": Case(lambda: Model(blocks=6), prefetching),
    "clipping": Case(Model, by_block, step=clipping, keeps_groups=True),
    "optimizer_in_backward": Case(Model, by_block, optimizer=BackwardOptimizer),
    "evaluation": Case(Model, by_block, step=evaluating),
    "checkpointed": Case(Model, checkpointed),
    "compiled": Case(Model, compiled),
    "tensor_parallel": Case(lambda: Model(hidden=36), tensor_parallel, keeps_groups=True),
    "sequence_parallel": Case(
        lambda: Model(hidden=36),
        sequence_parallel,
        keeps_groups=True,
        gloo_ends_on_gpu=True,  # coalesced all-gather
    ),
    "expert_mesh": Case(ExpertModel, expert_mesh, since=(2, 12)),
    "pipeline_like": Case(Model, masters, step=accumulate(pipeline_like)),
    "kept_storage": Case(Model, by_block, prepare=keep_storage, calls_served=False, since=(2, 15)),
    "unused_parameters": Case(Skipping, by_block, step=conditional),
    "async_unshard": Case(Model, by_block, prepare=async_unshard),
    "rare_switches": Case(
        Skipping, by_block_and_embedding, step=conditional, prepare=head_start, since=(2, 14)
    ),
    "manual_finalization": Case(Model, masters, step=finalizing, since=(2, 15)),
    "fp64": Case(lambda: Model().double(), by_block),
    "divided_by_three": Case(Model, divided(3.0), exact_beside_stock=False),
    "divided_by_ranks": Case(Model, divided(4.0)),
    "forced_sums": Case(Model, masters, prepare=forced_sums),
    "reduce_hook": Case(Model, masters, prepare=hooked),
    "separate_group": Case(Model, separate_group, since=(2, 14)),
    "mixed_dtypes": Case(mixed_model, mixed_dtypes, since=(2, 15)),
    "fp16_reduction": Case(Model, fp16_reduction, ulp_of=torch.float16),
    "fp32_gradients": Case(bf16_with_fp32_gradients, by_block, optimizer=sgd),
}
