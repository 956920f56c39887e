"""Which transport carries the tokens: what each would move and hold, which can, and which one is taken.

    config, mesh --options--> a row for each transport --choose_transport--> Choice(transport, rows)    printed, saved

`parallel.experts.transport=auto` takes the first that can of

    local          ep = 1: nothing moves
    hierarchical   ep spans nodes (parallel.experts.devices_per_node): few peers a hop, the slow link crossed once
    rowwise        ep within a node, up to 32 devices: the fewest bytes, no permutation on arrival
    all_to_all     more devices than a ragged exchange serves
    all_gather     by request, and where nothing else can: bytes grow with ep

Whether the ragged exchange is also the fastest on a given machine is a question for `python -m moejax.bench dispatch`.
"""

from dataclasses import asdict, dataclass
from typing import Any

from moejax.config import Config, Dtype, Format, Granularity, Overflow
from moejax.config import Transport as Name
from moejax.config_mxfp8 import BLOCK
from moejax.errors import UserError
from moejax.mesh import MeshShape
from moejax.moe.all_gather import AllGather
from moejax.moe.all_to_all import AllToAll
from moejax.moe.dispatch import Transport
from moejax.moe.hierarchical import Hierarchical
from moejax.moe.local import Local
from moejax.moe.rowwise import Rowwise


@dataclass(frozen=True)
class Option:
    """One transport for one config. buffer_rows: of the receive buffer of each device. sent_bytes: from each device in
    one optimizer step, all MoE layers of its stage, forward and backward, at balance. refusal: why it cannot, None if
    it can.
    """

    transport: str
    buffer_rows: int
    sent_bytes: int
    refusal: str | None


@dataclass(frozen=True)
class Choice:
    transport: Transport
    options: tuple[Option, ...]

    def table(self) -> str:
        """The options as lines of text, the one taken marked."""
        lines = ["Transports: (buffer rows and bytes sent, per device and step)"]
        for option in self.options:
            mark = ">" if option.transport == self.transport.name else " "
            sizes = f"{option.buffer_rows:>12,} rows {option.sent_bytes / 2**20:>12,.1f} MiB"
            lines.append(f"{mark} {option.transport:<13}" + (f"no: {option.refusal}" if option.refusal else sizes))
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """For the run's record: what was taken, and from which table."""
        return {"transport": self.transport.name, "options": [asdict(option) for option in self.options]}


def make_transport(name: Name, config: Config, shape: MeshShape) -> Transport:
    """The transport of that name with the config's options; `auto` is none. Not checked against its limits."""
    experts, axis = config.parallel.experts, ("ep", shape.ep)
    factor = experts.capacity_factor
    match name:
        case Name.local:
            return Local()
        case Name.rowwise:
            return Rowwise(*axis, factor, experts.overflow, experts.granularity)
        case Name.all_to_all:
            return AllToAll(*axis, factor)
        case Name.all_gather:
            return AllGather(*axis, factor, experts.overflow)
        case Name.hierarchical:
            return Hierarchical(*axis, experts.devices_per_node, factor, experts.overflow)
    raise ValueError(f"{name} is not a transport.")


def layer_shape(config: Config, shape: MeshShape) -> tuple[int, int, int]:
    """(T, K, E): tokens of a microbatch on one device, experts per token, experts."""
    tokens = config.train.batch_tokens // config.parallel.pipeline.microbatches // shape.data_shards
    return tokens, config.model.moe.top_k, config.model.moe.num_experts


def options(config: Config, shape: MeshShape) -> tuple[Option, ...]:
    """Every transport, the preferred ones first."""
    layer = layer_shape(config, shape)
    itemsize = {Dtype.float32: 4, Dtype.bfloat16: 2}[config.precision.compute]
    scales = 1.0
    if config.precision.mxfp8.experts == Format.mxfp8:
        itemsize, scales = 1, 1 + 1 / BLOCK  # a byte a number, and a byte for each block
    layers = -(-config.model.n_moe_layers // shape.pp)
    exchanges = 2 * layers * config.parallel.pipeline.microbatches  # forward and backward
    rows = []
    for name in (Name.local, Name.hierarchical, Name.rowwise, Name.all_to_all, Name.all_gather):
        transport = make_transport(name, config, shape)
        refusal = transport.refusal(*layer)
        if name == Name.local and shape.ep > 1:
            refusal = f"needs ep=1, and the mesh has ep={shape.ep}"
        if name == Name.all_to_all and config.parallel.experts.overflow == Overflow.drop:
            refusal = "has slots of another kind than overflow=drop is about"
        sent = transport.sent_bytes(*layer, config.model.d_model, itemsize) * scales * exchanges
        rows.append(Option(name.value, transport.buffer_rows(*layer), int(sent), refusal))
    return tuple(rows)


def choose_transport(config: Config, shape: MeshShape) -> Choice:
    """The transport that `parallel.experts.transport` names, or the first that can of the list above.

    Raises UserError if the named one is outside its limits, or if none can.
    """
    wanted, table = config.parallel.experts.transport, options(config, shape)
    refusals = {option.transport: option.refusal for option in table}
    fitting = [option.transport for option in table if option.refusal is None]
    if wanted != Name.auto:
        refusal = refusals[wanted.value]
        if refusal is not None and config.model.n_moe_layers:
            others = f"take {' or '.join(fitting)}" if fitting else "no other transport can either"
            raise UserError(f"parallel.experts.transport={wanted.value} cannot be used here: {refusal}; {others}.")
        return Choice(make_transport(wanted, config, shape), table)
    if config.parallel.experts.granularity == Granularity.peer and shape.ep > 1:
        fitting = [name for name in fitting if name == Name.rowwise.value]
    if not fitting:
        reasons = "; ".join(f"{name}: {refusal}" for name, refusal in refusals.items() if refusal)
        raise UserError(
            f"No transport can carry this layer at ep={shape.ep} ({reasons}); use a smaller ep or microbatch."
        )
    return Choice(make_transport(Name(fitting[0]), config, shape), table)
