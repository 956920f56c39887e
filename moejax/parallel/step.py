"""The train step: one manual region for forward and backward, then Optax on the shards, all in one compiled program.

    params, batch --region: stages over pp, experts over ep, gradients reduced over the replicas--> fp32 gradient shards
    gradient shards, master, moments --optax--> master, moments --cast, all-gather--> params

`TrainProgram` holds what belongs to a (config, mesh) pair: shardings, abstract state, and the compiled functions.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from moejax.config import Config, PipelineEnds, Recompute, Region, RegionsConfig, ScoreBias, Stash, Strategy
from moejax.context import Context
from moejax.errors import UserError
from moejax.mesh import DATA_AXES, MeshShape, check_fit
from moejax.models.head import IGNORED
from moejax.models.transformer import Params, abstract_params, init_params, logical_axes
from moejax.moe.choose import choose_transport
from moejax.moe.selection import move_score_bias
from moejax.moe.statistics import RouterStatistics, reduce_over_devices
from moejax.parallel import fsdp, mxfp8, pipeline, sharding
from moejax.parallel.layout import Layout, StackLayout, make_layout, to_logical, to_physical
from moejax.parallel.optimizer import learning_rate, make_optimizer
from moejax.parallel.schedule_choice import choose_schedule
from moejax.parallel.schedule_wiring import wire
from moejax.parallel.stage import Microbatch, StageProgram, Totals

BATCH_SPEC = PartitionSpec(None, DATA_AXES)  # [microbatches, sequences, tokens]


class TrainState(NamedTuple):
    """Everything that training changes. Stacked blocks are in the order stages hold them (`layout.to_physical`).

    step: int32; optimizer steps done. params: working weights. master: fp32. moments: optax state.
    score_bias: fp32[L, E]; of the routers' choice, by MoE layer in model order; None without any. Zeros unless used.
    """

    step: Array
    params: Params
    master: Params
    moments: Any
    score_bias: Array | None


class PortableState(NamedTuple):
    """What a checkpoint holds: all in fp32 and in model order, so that any mesh, schedule or precision can take it up.

    step: int32. master, first_moment, second_moment: as `transformer.abstract_params`. score_bias: as in `TrainState`.
    """

    step: Array
    master: Params
    first_moment: Params
    second_moment: Params
    score_bias: Array | None


class StepMetrics(NamedTuple):
    """fp32, replicated; means are over the non-ignored tokens of the whole batch.

    loss: cross entropy in nats. z_loss: weighted, of the output logits. auxiliary_loss: weighted, of the routers.
    gradient_norm: global, before clipping. learning_rate. tokens: non-ignored ones.
    routing: `RouterStatistics` with a leading axis of MoE layers in model order, None without any: sums over the batch,
        but scores, balance, z and margin divided by tokens.
    """

    loss: Array
    z_loss: Array
    auxiliary_loss: Array
    gradient_norm: Array
    learning_rate: Array
    tokens: Array
    routing: RouterStatistics | None


class TrainProgram:
    """The step of one config on one mesh, and the shardings around it.

        program = TrainProgram(config, mesh)
        state = program.init()
        state, metrics = program.step(state, batch)       # batch: Microbatch of int32 [M, B, S], see `place_batch`

    Raises UserError if the config does not fit the mesh.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.shape = MeshShape(**dict(mesh.shape))
        check_fit(config, self.shape)
        mxfp8.check_hardware(config, mesh)
        model, pipe = config.model, config.parallel.pipeline
        self.schedule = choose_schedule(config, self.shape.pp, pipe.microbatches)
        self.ends_apart = pipe.ends == PipelineEnds.sharded and self.shape.pp > 1
        if self.ends_apart and model.vocab_size % self.shape.pp:
            raise UserError(
                f"parallel.pipeline.ends=sharded cuts model.vocab_size={model.vocab_size} into pp={self.shape.pp} "
                "parts, which do not come out even; pad the vocabulary, or set ends=stages."
            )
        self.fully_sharded = config.parallel.strategy == Strategy.fsdp
        self.rules = sharding.SHARED_ENDS if self.ends_apart else sharding.RULES
        self.rules = sharding.CUT_ALIKE if self.fully_sharded else self.rules
        self.layout: Layout = make_layout(model.n_layers, model.n_dense_layers, self.schedule, self.ends_apart)
        # with all experts on every device, tokens are at home as on a mesh without ep
        own = MeshShape(dp=self.shape.data_shards) if self.fully_sharded else self.shape
        self.choice = choose_transport(config, own)
        self.transport = self.choice.transport
        self.optimizer = make_optimizer(config.optimizer, config.train.steps)
        self.params_dtype = jnp.dtype(config.precision.params.value)

        self.axes = logical_axes(model)
        self.logical_params = abstract_params(model)
        self.abstract = jax.eval_shape(self._to_physical, self.logical_params)
        self.zero = sharding.zero_layouts(self.abstract, self.axes, self.shape, self.rules)
        self.zero_specs = jax.tree.map(lambda layout: layout.spec, self.zero)
        self.param_specs = jax.tree.map(
            lambda axes: sharding.param_spec(axes, self.rules), self.axes, is_leaf=sharding.is_axes
        )
        if self.fully_sharded:
            self.param_specs = self.zero_specs
        self.working_specs = mxfp8.specs(config, self.abstract, self.axes, self.param_specs)
        self.recipe = mxfp8.recipe(config)
        self.stages = StageProgram(
            model,
            self.layout,
            jnp.dtype(config.precision.compute.value),
            Recompute.named if pipe.stash == Stash.named else config.parallel.recompute,
            tuple(f.name for f in fields(RegionsConfig) if getattr(config.parallel.regions, f.name) == Region.keep),
            *([fsdp.gather(self.zero)] if self.fully_sharded else []),
        )
        self.step = jax.jit(self._step, donate_argnums=0, out_shardings=(self.state_shardings(), None))
        self.evaluate = jax.jit(self._evaluate)

    def pipeline(self, microbatches: int, training: bool = True) -> pipeline.Pipeline:
        """The table that a batch of this many microbatches is run by."""
        pipe = self.config.parallel.pipeline
        schedule = choose_schedule(self.config, self.shape.pp, microbatches)
        if not training:
            return pipeline.Pipeline(pipeline.forward_only(schedule, self.ends_apart), pipe.mode)
        # one virtual stage runs its backward right after its forward: there is nothing to keep between the two
        keep_inputs = pipe.stash == Stash.inputs or schedule.virtual_stages == 1
        return pipeline.Pipeline(wire(schedule, keep_inputs, self.ends_apart), pipe.mode)

    # --- layouts and shardings -------------------------------------------------------------------------------------

    def _to_physical(self, params: Params) -> Params:
        stacks = self.layout.stacks
        return {name: to_physical(p, stacks[name]) if name in stacks else p for name, p in params.items()}

    def _to_logical(self, params: Params) -> Params:
        stacks = self.layout.stacks
        return {name: to_logical(p, stacks[name]) if name in stacks else p for name, p in params.items()}

    def named(self, specs: PyTree[PartitionSpec]) -> PyTree[NamedSharding]:
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda s: isinstance(s, PartitionSpec)
        )

    def state_shardings(self) -> TrainState:
        abstract = self.abstract_state()
        replicated = NamedSharding(self.mesh, PartitionSpec())
        master = self.named(self.zero_specs)
        moments = optax.tree_map_params(
            self.optimizer, lambda _, s: s, abstract.moments, master, transform_non_params=lambda _: replicated
        )
        bias = None if abstract.score_bias is None else replicated
        return TrainState(replicated, self.named(self.working_specs), master, moments, bias)

    def data_shard(self) -> tuple[int, int]:
        """(i, n): this process feeds part i of n equal parts of each batch; processes of other stages may share it."""
        sequences = self.config.train.batch_tokens // self.config.data.sequence_length
        per_part = sequences // self.config.parallel.pipeline.microbatches
        shape = (self.config.parallel.pipeline.microbatches, per_part, self.config.data.sequence_length)
        mine = NamedSharding(self.mesh, BATCH_SPEC).addressable_devices_indices_map(shape).values()
        starts = sorted({index[1].indices(per_part)[0] for index in mine if index is not None})
        size = per_part // self.shape.data_shards * len(starts)
        return starts[0] // size, per_part // size

    def place_batch(self, batch: Mapping[str, np.ndarray]) -> Microbatch:
        """This process's rows of a batch, [sequences, S] each, to a global Microbatch of [M, B, S] on the devices.

        Sequence i belongs to microbatch i mod M, so that the microbatches are the same however many processes there
        are. M follows from the number of sequences, microbatches being as large as the config has them; what is missing
        to the last whole one is padding, which is routed nowhere, has no loss and is counted nowhere. A new M compiles
        anew.
        """
        _, shards = self.data_shard()
        config = self.config
        whole = (
            config.train.batch_tokens // config.data.sequence_length // config.parallel.pipeline.microbatches // shards
        )
        parts = -(-len(batch["tokens"]) // whole)
        placed = NamedSharding(self.mesh, BATCH_SPEC)
        filler = {"tokens": 0, "labels": IGNORED, "segment_ids": -1, "positions": 0}

        def place(name: str) -> Array:
            x = np.asarray(batch[name], np.int32)
            x = np.pad(x, ((0, parts * whole - len(x)), (0, 0)), constant_values=filler[name])
            by_microbatch = np.ascontiguousarray(x.reshape(-1, parts, x.shape[-1]).swapaxes(0, 1))
            return jax.make_array_from_process_local_data(placed, by_microbatch)

        return Microbatch(place("tokens"), place("labels"), place("segment_ids"), place("positions"))

    # --- the beginning ---------------------------------------------------------------------------------------------

    def _fresh(self, key: Array) -> TrainState:
        # the barrier keeps the draws out of the loops that put layers in their places: fused with those, a value could
        # differ in its last bit from the one drawn on another mesh
        return self._with_params(lax.optimization_barrier(init_params(self.config.model, key)))

    def _zero_score_bias(self) -> Array | None:
        model = self.config.model
        return jnp.zeros((model.n_moe_layers, model.moe.num_experts), jnp.float32) if model.n_moe_layers else None

    def _with_params(self, params: Params, score_bias: Array | None = None) -> TrainState:
        """The state of step 0 from logical fp32 weights."""
        master = self._between_orders(self._to_physical)(params)
        master = jax.tree.map(lax.with_sharding_constraint, master, self.named(self.zero_specs))
        weights = self._working(master)
        bias = self._zero_score_bias() if score_bias is None else score_bias
        return TrainState(jnp.zeros((), jnp.int32), weights, master, self.optimizer.init(master), bias)

    def _working(self, master: Params) -> Params:
        """What the region computes with, from the master: weights in `precision.params`, some in MXFP8."""
        weights = jax.tree.map(
            lambda m, s: lax.with_sharding_constraint(m.astype(self.params_dtype), s),
            master,
            self.named(self.param_specs),
        )
        return mxfp8.quantise(self.config, self.mesh, master, self.axes, weights, self.working_specs)

    def init(self) -> TrainState:
        """Fresh weights from `train.seed`: the same on every mesh."""
        with jax.set_mesh(self.mesh):
            fresh = jax.jit(self._fresh, out_shardings=self.state_shardings(), compiler_options=self._quick_compile())
            return fresh(jax.random.key(self.config.train.seed))

    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of a state, nothing computed."""
        return jax.eval_shape(self._fresh, jax.random.key(0))

    def _quick_compile(self) -> dict[str, Any]:
        """On CPU the initial weights are compiled without optimisation: 2 s, not 16 s (2026-11), and it runs once."""
        if self.mesh.devices.flat[0].platform != "cpu":
            return {}
        return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

    def lower(self, microbatches: int | None = None) -> Any:
        """The step lowered from shapes alone, to `.compile()` on devices that need not be there."""
        config = self.config
        parts = config.parallel.pipeline.microbatches
        sequences = config.train.batch_tokens // config.data.sequence_length // parts
        shape = (microbatches or parts, sequences, config.data.sequence_length)
        shapes = self.abstract_state()
        placed = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)  # noqa: E731
        state = jax.tree.map(placed, shapes, self.state_shardings())
        tokens = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(self.mesh, BATCH_SPEC))
        with jax.set_mesh(self.mesh), jax.default_device(self.mesh.devices.flat[0]):
            return self.step.lower(state, Microbatch(tokens, tokens, tokens, tokens))

    def with_params(self, params: Params, score_bias: Array | np.ndarray | None = None) -> TrainState:
        """The state of step 0 with given weights, in model order (`abstract_params`), e.g. from an importer."""
        with jax.set_mesh(self.mesh):
            return jax.jit(self._with_params, out_shardings=self.state_shardings())(params, score_bias)

    # --- what outlives the mesh ------------------------------------------------------------------------------------

    def portable_shardings(self) -> PortableState:
        """Shardings of the portable state on this mesh: as the master's, layers whole where stages pad or reorder
        them."""

        def spec(shape: Any, axes: tuple[str, ...], stack: StackLayout | None) -> PartitionSpec:
            if stack is None or stack.identity:
                return sharding.zero_layout(shape.shape, axes, self.shape, self.rules).spec
            # the layer axis of the logical stack does not divide over pp: cut another dimension over all replicas
            return sharding.zero_layout(shape.shape, ("", *axes[1:]), self.shape, self.rules).spec

        specs = {
            name: jax.tree.map(lambda s, a, n=name: spec(s, a, self.layout.stacks.get(n)), shapes, self.axes[name])
            for name, shapes in self.logical_params.items()
        }
        weights = self.named(specs)
        replicated = NamedSharding(self.mesh, PartitionSpec())
        bias = replicated if self.config.model.n_moe_layers else None
        return PortableState(replicated, weights, weights, weights, bias)

    def portable_target(self) -> PortableState:
        """Shapes, dtypes and shardings to restore a portable state into."""
        weights, step = self.logical_params, jax.ShapeDtypeStruct((), jnp.int32)
        abstract = PortableState(step, weights, weights, weights, jax.eval_shape(self._zero_score_bias))
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, self.portable_shardings()
        )

    def portable(self, state: TrainState) -> PortableState:
        """The state in model order, independent of mesh, schedule, transport and precision."""
        with jax.set_mesh(self.mesh):
            return jax.jit(self._portable, out_shardings=self.portable_shardings())(state)

    def from_portable(self, portable: PortableState) -> TrainState:
        """The inverse, on this mesh; bit for bit."""
        with jax.set_mesh(self.mesh):
            return jax.jit(self._from_portable, out_shardings=self.state_shardings())(portable)

    def _between_orders(self, reorder: Callable[[Params], Params]) -> Callable[[Params], Params]:
        """`_to_logical` or `_to_physical` with the layers of a weight whole on every stage while they change places.

        XLA's partitioner aborts where one step both moves layers and cuts the other dimensions anew (dp=4,pp=3 on CPU,
        jaxlib 0.12.0.1: "Could not slice dimension 1 with size 4"). Costs pp times the weight's part for a moment.
        """

        def whole(params: Params) -> Params:
            moving = {name for name, stack in self.layout.stacks.items() if not stack.identity}

            def one(x: Array, spec: PartitionSpec) -> Array:
                return lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(None, *spec[1:])))

            return {n: jax.tree.map(one, p, self.zero_specs[n]) if n in moving else p for n, p in params.items()}

        return lambda params: whole(reorder(whole(params)))

    def _portable(self, state: TrainState) -> PortableState:
        first, second = (optax.tree_utils.tree_get(state.moments, name) for name in ("mu", "nu"))
        master, first, second = map(self._between_orders(self._to_logical), (state.master, first, second))
        return PortableState(state.step, master, first, second, state.score_bias)

    def _from_portable(self, portable: PortableState) -> TrainState:
        state = self._with_params(portable.master, portable.score_bias)
        first, second = map(self._between_orders(self._to_physical), (portable.first_moment, portable.second_moment))
        # every count in the optimizer's state is the number of steps done
        moments = optax.tree_utils.tree_set(state.moments, mu=first, nu=second, count=portable.step)
        return state._replace(step=portable.step, moments=moments)

    # --- the step --------------------------------------------------------------------------------------------------

    def gradients(
        self, params: Params, batch: Microbatch, key: Array, score_bias: Array | None = None
    ) -> tuple[Params, Totals, Array]:
        """fp32 gradients sharded as the master, totals over the whole batch, and the number of non-ignored tokens."""
        by_stage = [PartitionSpec("pp")] * len(RouterStatistics._fields)
        statistics = RouterStatistics(*by_stage) if self.stages.moe_slots else None
        scalar = PartitionSpec()
        region = jax.shard_map(
            self._region,
            mesh=self.mesh,
            in_specs=(self.working_specs, Microbatch(*[BATCH_SPEC] * 4), scalar, scalar),
            out_specs=(self.zero_specs, Totals(scalar, scalar, scalar, statistics), scalar),
            check_vma=False,
        )
        return region(params, batch, key, score_bias)

    def _evaluate(self, params: Params, batch: Microbatch, score_bias: Array | None = None) -> tuple[Array, Array]:
        """(sum of cross entropy in nats, non-ignored tokens) of a batch, forward only."""
        scalar = PartitionSpec()
        region = jax.shard_map(
            self._evaluation_region,
            mesh=self.mesh,
            in_specs=(self.working_specs, Microbatch(*[BATCH_SPEC] * 4), scalar),
            out_specs=(scalar, scalar),
            check_vma=False,
        )
        return region(params, batch, score_bias)

    @property
    def data_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in DATA_AXES if getattr(self.shape, axis) > 1)

    def _sum_over_data(self, x: Any) -> Any:
        return lax.psum(x, self.data_axes) if self.data_axes else x

    def _region(
        self, params: Params, batch: Microbatch, key: Array, score_bias: Array | None
    ) -> tuple[Params, Totals, Array]:
        gradients, totals, loss_tokens = self._run(params, batch, key, score_bias, training=True)
        with jax.named_scope("reduce_gradients"):
            layouts = fsdp.not_yet_summed(self.zero) if self.fully_sharded else self.zero
            gradients = jax.tree.map(sharding.reduce_gradient, gradients, layouts)
        return gradients, self._global(totals), loss_tokens

    def _evaluation_region(self, params: Params, batch: Microbatch, score_bias: Array | None) -> tuple[Array, Array]:
        # random routing, if that is asked for, draws the same in every evaluation
        _, totals, loss_tokens = self._run(params, batch, jax.random.key(0), score_bias, training=False)
        return self._global(totals).cross_entropy, loss_tokens

    def _global(self, totals: Totals) -> Totals:
        everywhere = (*self.data_axes, "pp")
        cross_entropy, z, auxiliary = lax.psum((totals.cross_entropy, totals.z, totals.auxiliary), everywhere)
        statistics = totals.statistics
        if statistics is not None and self.data_axes:
            statistics = reduce_over_devices(statistics, self._sum_over_data, lambda x: lax.pmax(x, self.data_axes))
        return Totals(cross_entropy, z, auxiliary, statistics)

    def _run(
        self, params: Params, batch: Microbatch, key: Array, score_bias: Array | None, training: bool
    ) -> tuple[Params, Totals, Array]:
        """The pipeline on this device's part, inside the manual region; the third is the non-ignored tokens' count."""
        # counts are whole numbers below 2^24 per device, summed exactly
        loss_tokens = jnp.maximum(self._sum_over_data(jnp.sum(batch.labels != IGNORED).astype(jnp.float32)), 1.0)
        tokens_M = self._sum_over_data(jnp.sum(batch.segment_ids >= 0, axis=(1, 2)).astype(jnp.float32))
        tokens_M = jnp.maximum(tokens_M, 1.0)  # a microbatch of padding alone has no balance, and no 0 / 0 either
        local = batch.tokens.shape[1]
        shard = lax.axis_index(self.data_axes) if self.data_axes else 0
        if score_bias is not None:  # a row for each layer of the model, dense ones included
            score_bias = jnp.pad(score_bias, ((self.config.model.n_dense_layers, 0), (0, 0)))

        def context_of(microbatch: Array, here: Microbatch) -> Context:
            return Context(
                segment_ids=here.segment_ids,
                positions=here.positions,
                sequence_ids=shard * local + jnp.arange(local),
                loss_tokens=loss_tokens,
                batch_tokens=tokens_M[microbatch],
                transport=self.transport,
                sum_over_data=self._sum_over_data,
                key=jax.random.fold_in(key, microbatch),
                score_bias=score_bias,
                training=training,
                recipe=self.recipe,
                excluded=mxfp8.excluded(self.config),
            )

        table = self.pipeline(batch.tokens.shape[0], training)
        gradients, totals = pipeline.run(self.stages, table, params, batch, context_of)
        return gradients, totals, loss_tokens

    def _step(self, state: TrainState, batch: Microbatch) -> tuple[TrainState, StepMetrics]:
        key = jax.random.fold_in(jax.random.key(self.config.train.seed), state.step)
        gradients, totals, tokens = self.gradients(state.params, batch, key, state.score_bias)
        with jax.named_scope("optimizer"):
            updates, moments = self.optimizer.update(gradients, state.moments, state.master)
            master = optax.apply_updates(state.master, updates)
            params = self._working(master)
        statistics = totals.statistics
        if statistics is not None:
            layers = to_logical(statistics, self.layout.stacks["moe_blocks"])
            per_token = ("scores", "balance", "z", "margin")
            statistics = layers._replace(**{name: getattr(layers, name) / tokens for name in per_token})
        metrics = StepMetrics(
            loss=totals.cross_entropy / tokens,
            z_loss=self.config.model.z_loss * totals.z / tokens,
            auxiliary_loss=totals.auxiliary,
            gradient_norm=optax.tree.norm(gradients),
            learning_rate=learning_rate(self.config.optimizer, self.config.train.steps)(state.step),
            tokens=tokens,
            routing=statistics,
        )
        return TrainState(state.step + 1, params, master, moments, self._next_score_bias(state, statistics)), metrics

    def _next_score_bias(self, state: TrainState, statistics: RouterStatistics | None) -> Array | None:
        router = self.config.model.moe.router
        if router.score_bias != ScoreBias.sign or statistics is None or state.score_bias is None:
            return state.score_bias
        return move_score_bias(state.score_bias, statistics.counts, router.score_bias_rate)

    def branch_shares(self) -> list[float]:
        """The part of the ticks in which each branch of the executor's switch runs, the mean over the stages."""
        table = self.pipeline(self.config.parallel.pipeline.microbatches)
        return pipeline.branch_shares(self.stages, table).mean(axis=0).tolist()

    def receive_buffer_rows(self) -> int:
        """Rows of the expert receive buffer on each device."""
        c = self.config
        tokens = c.train.batch_tokens // c.parallel.pipeline.microbatches // self.shape.data_shards
        return self.transport.buffer_rows(tokens, c.model.moe.top_k, c.model.moe.num_experts)

    def parameter_bytes_per_device(self) -> int:
        """Bytes of the working weights on one device."""
        weights = self.abstract_state().params
        return mxfp8.bytes_on_device(weights, self.working_specs, self.mesh)
