"""A context of the library: the keys and values of some sequences, and the forward pass over them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import msgspec
import numpy as np

from exo_mesh.engine.free_cores import FreeCores
from exo_mesh.errors import EngineError
from exo_mesh_llamacpp.layouts import EvalCallback, LlamaBatch
from exo_mesh_llamacpp.library import Library
from exo_mesh_llamacpp.model import LoadedModel
from exo_mesh_llamacpp.states import of_one_stream, of_streams
from exo_mesh_llamacpp.types import KV_TYPES

MAX_TOKENS = 512
"""Most tokens of one forward pass; longer rows are computed in several."""

MIN_TOKENS = 32
SCORES_BYTES = 128 * 2**20
"""Without flash attention, a pass computes the scores of all its tokens with all positions for all heads at once. A
pass over many positions has fewer tokens, down to MIN_TOKENS, so that these scores stay below this size."""

MAX_LOGITS = 64
"""Tokens of one forward pass of a last stage whose logits are wanted: they take room for the whole vocabulary each."""

_AXES = 4
_ROPES_OF_AXES = (8, 40)
"""LLAMA_ROPE_TYPE_MROPE and _IMROPE: positions of four axes for each token. Text has equal positions on three axes, and
0 on the last."""

_PARTIAL = 1
"""LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: the parts of a state that cannot be cut back."""

_TAIL = 8
"""Positions that are moved at once behind a window: no window is shorter."""

_FULL = 1
"""Return code of llama_decode: no room, and nothing has changed."""


class StageShape(msgspec.Struct, frozen=True):
    """The sizes of a stage, and how its contexts compute. head: the width of the logits; 0 before the last stage.
    num_heads: of attention, the most of any layer of the model. stops: layers at which a pass of a last stage stops, as
    the passes of a model that is cut there; a GPU may otherwise compute what is on both sides of a cut at once.
    cores: fewer than `threads` compute while other programs need the cores, in all contexts of the stage alike: a new
    context would begin with all threads. windowed: some layers have a window, and none a recurrent state."""

    hidden: int
    head: int
    num_heads: int
    kv: str
    flash: bool
    unified: bool
    threads: int
    stops: tuple[int, ...] = ()
    cores: FreeCores | None = None
    windowed: bool = False


def pass_tokens(shape: StageShape, slots: int, cells: int) -> int:
    """Most tokens of one pass of a context. The same for all stages of a model, because bits depend on it."""
    if shape.flash:
        return MAX_TOKENS
    scores = 4 * max(1, shape.num_heads) * cells * (slots if shape.unified else 1)
    return min(MAX_TOKENS, max(MIN_TOKENS, SCORES_BYTES // scores))


class LlamaContext:
    """Room for `slots` sequences of `cells` positions each, or of `cells` together if they are shared. `hidden` is the
    input of `decode`."""

    def __init__(self, model: LoadedModel, shape: StageShape, slots: int, cells: int, *, shared: bool = False) -> None:
        """Raises EngineError if the library cannot make it, as for lack of memory."""
        self.slots, self.cells = slots, cells
        self.unified = shape.unified or shared
        self._room = cells if shared else slots * cells
        self.max_tokens = pass_tokens(shape, 1 if shared else slots, cells)
        self._shape = shape
        self._library: Library = model.library
        self._call = model.library.call
        self._tap_name = f"l_out-{model.num_layers - 1}".encode()
        self._tap = EvalCallback(self._stopper() if shape.head else self._watcher())
        count = self.max_tokens
        self._tapped = np.empty((count, shape.hidden), np.float32)
        self._filled = 0
        self._limit = self._tapped.nbytes
        self.hidden = np.zeros((count, shape.hidden), np.float32)
        self.positions = np.zeros(count, np.int32)
        self._axes = self._call.llama_model_rope_type(model.handle) in _ROPES_OF_AXES
        self._on_axes = np.zeros(_AXES * count, np.int32)
        self.sequences = np.zeros(count, np.int32)
        self.wanted = np.ones(count, np.int8)
        self._counts = np.ones(count, np.int32)
        self._pointers = self.sequences.ctypes.data + 4 * np.arange(count + 1, dtype=np.uint64)
        self._pointers[-1] = 0
        self._batch = LlamaBatch(
            0,
            None,
            self.hidden.ctypes.data,
            (self._on_axes if self._axes else self.positions).ctypes.data,
            self._counts.ctypes.data,
            self._pointers.ctypes.data,
            self.wanted.ctypes.data,
        )
        self._handle = self._open(model)
        self._memory = self._call.llama_get_memory(self._handle)
        self._threads = shape.threads
        self._logits_at = 0
        self._logits_there = np.empty((0, shape.head), np.float32)
        """A view of the logits, which the library keeps in one place. Making it takes as long as copying a row."""

    def _follow_load(self, cores: FreeCores) -> None:
        if (count := cores.now()) != self._threads:
            self._call.llama_set_n_threads(self._handle, count, count)
            self._threads = count

    def _open(self, model: LoadedModel) -> int:
        shape = self._shape
        params = self._call.llama_context_default_params()
        params.n_ctx = self._room
        params.n_batch = params.n_ubatch = self.max_tokens
        # of windows: one to move sequences, and for each slot another one, see `protect`
        params.n_seq_max = num_sequences = 2 * self.slots + 1 if shape.windowed else self.slots
        params.n_outputs_max_per_seq = min(MAX_LOGITS, self.max_tokens) if shape.head else self.max_tokens
        # with fewer, the library ends the process
        params.n_outputs_max = max(num_sequences, params.n_outputs_max_per_seq)
        params.n_threads = params.n_threads_batch = shape.threads
        params.flash_attn_type = int(shape.flash)
        params.type_k = params.type_v = KV_TYPES[shape.kv].number
        params.kv_unified = self.unified
        params.swa_full = True
        params.no_perf = True
        if shape.stops or not shape.head:
            params.cb_eval = ctypes.cast(self._tap, ctypes.c_void_p).value
        self._library.forget_log()
        handle = self._call.llama_init_from_model(model.handle, params)
        if not handle:
            why = self._library.last_error() or "not enough memory"
            raise EngineError(f"no room for {self._room} positions of {self.slots} sequences: {why}")
        return int(handle)

    def free(self) -> None:
        self._call.llama_free(self._handle)
        self._handle = 0
        del self._tap  # it refers to this object

    def decode(self, num_tokens: int) -> np.ndarray | None:
        """Compute the first tokens of `hidden`, whose places are in `positions` and `sequences`.

        Returns the hidden states `[num_tokens, hidden]`, or on a last stage the logits of the tokens in `wanted`; valid
        until the next call. None if there is no room. Raises EngineError for any other failure.
        """
        self._batch.n_tokens = num_tokens
        if self._axes:
            self._on_axes[: 3 * num_tokens] = np.tile(self.positions[:num_tokens], 3)
            self._on_axes[3 * num_tokens : _AXES * num_tokens] = 0
        self._filled = 0
        if self._shape.cores is not None:
            self._follow_load(self._shape.cores)
        code = self._call.llama_decode(self._handle, self._batch)
        if code == _FULL:
            return None
        if code:
            raise EngineError(f"llama_decode failed with {code}: {self._library.last_error() or 'no reason given'}")
        self._call.llama_synchronize(self._handle)
        if self._shape.head:
            count = int(np.count_nonzero(self.wanted[:num_tokens]))
            if not count:
                return np.empty((0, self._shape.head), np.float32)
            return self._logits(count)
        if self._filled != num_tokens * self._shape.hidden * 4:
            raise EngineError(f"llama.cpp gave {self._filled} bytes of hidden states for {num_tokens} tokens")
        return self._tapped[:num_tokens]

    def _logits(self, count: int) -> np.ndarray:
        """The library's own logits of the last pass, `[count, head]`."""
        address = self._call.llama_get_logits(self._handle)
        if not address:
            raise EngineError("llama.cpp gives no logits")
        if address != self._logits_at or len(self._logits_there) < count:
            there = (ctypes.c_float * self._shape.head * count).from_address(address)
            self._logits_at, self._logits_there = address, np.ctypeslib.as_array(there)
        return self._logits_there[:count]

    def decode_states(self, num_tokens: int) -> np.ndarray | None:
        """The same on a last stage, but the states after the last norm of all tokens, at most MAX_LOGITS,
        `[num_tokens, hidden]`."""
        self.wanted[:num_tokens] = 1
        self._call.llama_set_embeddings(self._handle, True)
        try:
            if self.decode(num_tokens) is None:
                return None
            found = self._call.llama_get_embeddings(self._handle)
            if not found:
                raise EngineError("llama.cpp does not give the hidden states of this model")
            return np.ctypeslib.as_array(found, (num_tokens, self._shape.hidden)).copy()
        finally:
            self._call.llama_set_embeddings(self._handle, False)

    def cut(self, slot: int, length: int) -> bool:
        """Forget the positions of a sequence from `length` on. False if its state cannot go back."""
        if not length and self._shape.windowed and slot < self.slots:
            self._remove(self._guard(slot), 0)
        return self._remove(slot, length)

    def _remove(self, slot: int, length: int) -> bool:
        return bool(self._call.llama_memory_seq_rm(self._memory, slot, length, -1))

    def share(self, source: int, slot: int, start: int, stop: int) -> None:
        """Give positions `[start, stop)` of a sequence to another one too. Only in a unified context: there they are
        the same cells afterwards."""
        assert self.unified, "the library ends the process if slots of several streams share a part of a sequence"
        self._call.llama_memory_seq_cp(self._memory, source, slot, start, stop)

    def length(self, slot: int) -> int:
        """Positions that a sequence holds."""
        return int(self._call.llama_memory_seq_pos_max(self._memory, slot)) + 1

    def save(self, slot: int) -> np.ndarray:
        """The state of a sequence: uint8 `[n]`, for any context of the same layers and settings."""
        state = np.empty(self._call.llama_state_seq_get_size(self._handle, slot), np.uint8)
        written = self._call.llama_state_seq_get_data(self._handle, state.ctypes.data, state.nbytes, slot)
        return of_one_stream(state[:written])

    def save_part(self, slot: int) -> np.ndarray:
        """The recurrent state of a sequence: uint8 `[n]`. Only if the library saves parts."""
        state = np.empty(self._call.llama_state_seq_get_size_ext(self._handle, slot, _PARTIAL), np.uint8)
        at, size = state.ctypes.data, state.nbytes
        return state[: self._call.llama_state_seq_get_data_ext(self._handle, at, size, slot, _PARTIAL)]

    def return_to(self, slot: int, part: np.ndarray, length: int) -> bool:
        """Cut a sequence back to the `length` positions that it held when its part was saved, in any context. False if
        the library refuses it."""
        at, size = part.ctypes.data, part.nbytes
        read = self._call.llama_state_seq_set_data_ext(self._handle, at, size, slot, _PARTIAL)
        return bool(read == size) and self.cut(slot, length)

    def protect(self, slot: int, length: int) -> None:
        """Keep all positions before `length`, also those that no window sees from the end; 0: none of those. The
        library uses their cells again, but no cells that belong to two sequences."""
        if self._shape.windowed:
            guard = self._guard(slot)
            self._remove(guard, 0)
            if length:
                self.share(slot, guard, 0, length)

    def _guard(self, slot: int) -> int:
        return self.slots + 1 + slot

    def move_to(self, slot: int, target: LlamaContext, place: int, settled: int) -> bool:
        """Copy a sequence to a slot of another context, so that it can be cut back to `settled` positions there. False
        if the library refuses it.

        A saved state has of a window only what its last position sees. So the positions behind `settled` are moved by
        themselves, a few at a time."""
        length = self.length(slot)
        if not self._shape.windowed or not 0 < settled < length:
            return target.restore(place, self.save(slot))
        if not target.restore(place, self._between(slot, 0, settled)):
            return False
        for start in range(settled, length, _TAIL):
            stop, spare = min(start + _TAIL, length), target.slots
            if not target.restore(spare, self._between(slot, start, stop)):
                return False
            target.share(spare, place, start, stop)
            target.cut(spare, 0)
        target.protect(place, length)
        return True

    def _between(self, slot: int, start: int, stop: int) -> np.ndarray:
        """The state of some positions of a sequence, which stays as it is."""
        self.share(slot, self.slots, start, stop)
        state = self.save(self.slots)
        self.cut(self.slots, 0)
        return state

    def restore(self, slot: int, state: np.ndarray) -> bool:
        """Replace a sequence by a saved state. False if the library refuses it; the sequence is then empty."""
        self.cut(slot, 0)
        fitted = of_streams(state, slot, 1 if self.unified else self.slots)
        read = self._call.llama_state_seq_set_data(self._handle, fitted.ctypes.data, fitted.nbytes, slot)
        if read == fitted.nbytes:
            return True
        self.cut(slot, 0)
        return False

    def _watcher(self) -> Callable[[int, bool, int | None], bool]:
        """A function that the library calls for each node of its graph: whether it is the output of the last layer, and
        then with its values. One forward pass may give them in several parts. A pass has some 30 nodes for each layer,
        so the answer must be quick."""
        get_name, wanted = self._library.get_name, self._tap_name

        def look(tensor: int, ask: bool, _user: int | None) -> bool:
            if ask:
                return bool(get_name(tensor) == wanted)
            self._take(tensor)
            return True

        return look

    def _stopper(self) -> Callable[[int, bool, int | None], bool]:
        """The same for a last stage, which only stops."""
        get_name, wanted = self._library.get_name, {f"l_out-{layer - 1}".encode() for layer in self._shape.stops}
        return lambda tensor, ask, _user: not ask or get_name(tensor) in wanted

    def _take(self, tensor: int) -> None:
        """Copy the values of a tensor behind the values that were taken before in this pass."""
        size = self._call.ggml_nbytes(tensor)
        if self._filled + size <= self._limit:
            self._call.ggml_backend_tensor_get(tensor, self._tapped.ctypes.data + self._filled, 0, size)
        self._filled += size
