"""What tasks of attention do, and those that move keys and values."""

from collections.abc import Callable, Mapping

from moebatch.engine.exchange import Exchange, load_bytes, off_bytes
from moebatch.engine.layout import AttentionInput
from moebatch.engine.pass_context import PassContext, PassRows
from moebatch.schedule.task import Kind, Task


class AttentionWork:
    """Attention of one pass, where everything else is computed or on the CPU beside it."""

    def __init__(self, rows: PassRows, context: PassContext) -> None:
        self._rows = rows
        self._decoder = context.decoder
        self._cache = context.cache
        self._beside = context.beside
        self._attended: dict[int, list[slice]] = {}
        on_cpu = [k for k, item in enumerate(rows.inputs) if rows.is_beside(item)]
        self._place_on_cpu = {k: place for place, k in enumerate(on_cpu)}

    @property
    def tasks(self) -> Mapping[Kind, Callable[[Task], None]]:
        """What to do by the kind of a task."""
        return {
            Kind.ATTEND: self._attend,
            Kind.PRE: self._pre,
            Kind.OFF: self._off,
            Kind.ATTN: self._attn,
            Kind.LOAD: self._load,
            Kind.OUT: self.out,
            Kind.KV_READ: self._kv,
            Kind.KV_UP: self._kv,
            Kind.KV_DOWN: self._kv,
            Kind.KV_WRITE: self._kv,
        }

    def num_bytes(self, task: Task) -> int:
        """Bytes that one of these tasks moves over its link."""
        shape, itemsize = self._decoder.shape, self._decoder.dtype.itemsize
        match task.kind:
            case Kind.OFF:
                return off_bytes(shape, self._rows.num_tokens(task), itemsize)
            case Kind.LOAD:
                return load_bytes(shape, self._rows.num_tokens(task), itemsize)
            case Kind.KV_READ | Kind.KV_UP | Kind.KV_DOWN | Kind.KV_WRITE:
                view = self._rows.input(task).view
                assert view is not None, "layers live elsewhere"
                return self._cache.num_bytes(task.kind, view, self._rows.layer(task))
            case _:
                return 0

    def attended(self, step: int) -> list[slice]:
        """Rows that have attended at a step, in their order; it may forget them then."""
        return self._attended.pop(step, [])

    def out(self, task: Task) -> None:
        """Takes in what the CPU has made of a micro-batch."""
        out_NHC = self._ring.out(self._number(task))
        item = self._rows.input(task)
        layer = self._rows.layer(task)
        self._decoder.add_attention(layer, self._rows.x_TD, item.direct, out_NHC)
        self._has_attended(task)

    def _attend(self, task: Task) -> None:
        layer, item = self._rows.layer(task), self._rows.input(task)
        micro_batch = item.micro_batch(direct=self._is_direct(item, layer))
        kv = self._cache.tensors(item.group.place, layer, item.window)
        self._decoder.attend(layer, self._rows.x_TD, micro_batch, kv.keys_RGC, kv.values_RGC)
        self._has_attended(task)

    def _pre(self, task: Task) -> None:
        micro_batch, into = self._rows.input(task).direct, self._ring.qkv(self._number(task))
        self._decoder.project(self._rows.layer(task), self._rows.x_TD, micro_batch, into=into)

    def _off(self, task: Task) -> None:
        self._ring.off(self._number(task), self._rows.num_tokens(task))

    def _attn(self, task: Task) -> None:
        assert self._beside is not None, "the CPU attends"
        layer, item = self._rows.layer(task), self._rows.input(task)
        number = self._number(task)
        kv = self._cache.tensors(item.group.place, layer, item.window)
        self._beside.core.attend(
            layer,
            self._ring.host_qkv(number),
            item.micro_batch(direct=self._is_direct(item, layer)),
            kv.keys_RGC,
            kv.values_RGC,
            self._ring.host_out(number),
        )

    def _load(self, task: Task) -> None:
        self._ring.load(self._number(task), self._rows.num_tokens(task))

    def _kv(self, task: Task) -> None:
        view, layer = self._rows.input(task).view, self._rows.layer(task)
        assert view is not None, "layers live elsewhere"
        move = {
            Kind.KV_READ: self._cache.read,
            Kind.KV_UP: self._cache.up,
            Kind.KV_DOWN: self._cache.down,
            Kind.KV_WRITE: self._cache.write,
        }[task.kind]
        move(view, layer)

    @property
    def _ring(self) -> Exchange:
        assert self._beside is not None, "the CPU attends"
        return self._beside.exchange

    def _number(self, task: Task) -> int:
        """Counts micro-batches that attend on the CPU, in the order of their turns."""
        assert task.micro_batch is not None, "a task of a micro-batch"
        return task.step * len(self._place_on_cpu) + self._place_on_cpu[task.micro_batch]

    def _is_direct(self, item: AttentionInput, layer: int) -> bool:
        return item.view is None or self._cache.is_direct(item.group.place, layer)

    def _has_attended(self, task: Task) -> None:
        self._attended.setdefault(task.step, []).append(self._rows.rows(task))
