"""Weights of 4 bits, and of 8 in the same layouts, of which checkpoints pack several into a word of 32 bits, the first
in the lowest bits. `X` is a layer's name, g the inputs of a group. The layouts:

- awq (AutoAWQ's gemm): `X.qweight` [in, out / 8], `X.qzeros` [in / g, out / 8], `X.scales` [in / g, out]. The outputs
  of a word stand in the order 0 2 4 6 1 3 5 7;
- gptq: `X.qweight` [in / n, out] for n values in a word, `X.qzeros` [in / g, out / n], `X.scales` [in / g, out], and
  `X.g_idx` [in], the group of each input, which "act-order" puts into any order. Zeros are stored less 1, but in
  `gptq_v2`;
- compressed-tensors' pack-quantized: `X.weight_packed` [out, in / n], `X.weight_scale` [out, in / g], perhaps
  `X.weight_zero_point` [out / n, in / g] and `X.weight_g_idx`; values and zeros are stored with half of their range
  added;
- MLX: `X.weight` [out, in / n] of uint32, `X.scales` and `X.biases` [out, in / g]: a value is q * scale + bias;
- NVFP4: bytes of two 4-bit floats [out, in / 2], and a float8 scale for 16 inputs times one scale for all: `X.weight`
  with `X.weight_scale` and `X.weight_scale_2` (ModelOpt), or `X.weight_packed` with `X.weight_scale` and the reciprocal
  `X.weight_global_scale` (compressed-tensors).

Whole numbers of at most 8 bits with a scale, perhaps an offset, for each group of inputs are kept so (`LazyQuantized`),
where they have one byte with their zero taken from them. Others are floats.
"""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from specserve.checkpoints.lazy import FLOAT32, Index, LazyQuantized, LazyTensor, blocks_of, fp4_values
from specserve.checkpoints.tensors import TensorFolder, mlx_base
from specserve.errors import CheckpointError

Packing = Literal["", "awq", "gptq", "compressed", "mlx"]
WORD = 32  # bits
NVFP4_BLOCK = 16
_AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the place in a word of each output
Opened = tuple[LazyTensor | LazyQuantized, tuple[str, ...]]  # a weight, and the tensors that it is made of


@dataclass(frozen=True)
class _Parts:
    """Tensors of a weight by what they are, checked as they are opened."""

    tensors: TensorFolder
    name: str  # of the weight, for errors

    def has(self, name: str) -> bool:
        return name in self.tensors.names()

    def shape(self, name: str, dtypes: str, expected: Sequence[int | None], what: str) -> tuple[int, ...]:
        """Return a tensor's shape. Raises CheckpointError where it is missing, or of another kind or shape; None in
        `expected` is any size."""
        if not self.has(name):
            raise CheckpointError(f"{self.name} is packed, and {name} is missing")
        shape, dtype = self.tensors.shape(name), self.tensors.dtype(name)
        fits = len(shape) == len(expected) and all(
            size in (want, size if want is None else want) for size, want in zip(shape, expected, strict=True)
        )
        if not fits or dtype.name not in dtypes.split():
            raise CheckpointError(
                f"{self.tensors.file(name).name}: {name} is {dtype} {list(shape)}, expected {what} of {dtypes}"
            )
        return shape

    def read(self, name: str, index: Index = ()) -> np.ndarray:
        return self.tensors.read(name, index)


_WORDS, _SCALES = "int32", "float16 bfloat16 float32"


@dataclass(frozen=True)
class Storing:
    """The facts about stored weights that their tensors do not show."""

    block: tuple[int, int] = (128, 128)  # outputs and inputs that share a scale, where scales are by block
    packing: Packing = ""  # the layout of words
    bits: int = 4  # of a packed value
    group: int = 0  # inputs that share a scale in words; 0: not stated
    zero_step: int = 0  # to be added to a stored zero
    needed: tuple[str, ...] = ()  # tensors beside each weight in words, without which it would be read otherwise
    others: tuple[tuple[str, "Storing"], ...] = ()  # of layers that are stored otherwise, by name

    def group_of(self, num_in: int, num_groups: int, where: str) -> int:
        """Return the inputs of a group, of which a weight has so many. Raises CheckpointError where they do not cover
        its inputs."""
        size = max(1, num_in if num_groups == 1 else self.group or num_in // max(1, num_groups))
        if -(-num_in // size) != num_groups:
            raise CheckpointError(f"{where}: {num_groups} groups of {size} inputs do not cover {num_in}")
        return size


def is_stored(names: Collection[str], name: str) -> bool:
    """Return whether a weight is among the tensors of these names, whole or packed."""
    return any(each in names for each in (name, f"{name}_packed", f"{name.removesuffix('.weight')}.qweight"))


def open_packed(tensors: TensorFolder, name: str, storing: Storing) -> Opened | None:
    """Open a weight that is packed; None: it is not. Raises CheckpointError for parts that are missing or do not fit
    each other."""
    parts, base = _Parts(tensors, name), name.removesuffix(".weight")
    own = dict(storing.others)
    storing = own.get(base, own.get(mlx_base(base), storing))
    packing, words = storing.packing, (f"{base}.qweight", f"{name}_packed")
    for part in storing.needed if any(map(parts.has, words)) else ():
        if not parts.has(f"{base}.{part}"):
            raise CheckpointError(f"{name} is packed, and {base}.{part} is missing")
    if parts.has(f"{name}_global_scale") or parts.has(f"{name}_scale_2"):
        return _open_nvfp4(parts, name)
    if packing in ("awq", "gptq") and parts.has(f"{base}.qweight"):
        return (_open_awq if packing == "awq" else _open_gptq)(parts, base, storing)
    if packing == "compressed" and parts.has(f"{name}_packed"):
        return _open_compressed(parts, name, storing)
    if packing == "mlx" and parts.has(f"{base}.scales"):
        return _open_mlx(parts, base, storing)
    return None


def _unpack(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """Return the values of words, as int32, side by side along the axis."""
    shifts = np.arange(0, WORD, bits, dtype=np.uint32)
    values = np.moveaxis(words.view(np.uint32), axis, -1)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return np.moveaxis(values.reshape(*values.shape[:-2], -1), -1, axis).astype(np.int32)


def _covering(places: slice | np.ndarray) -> slice:
    if isinstance(places, slice):
        return places
    return slice(int(places.min(initial=0)), int(places.max(initial=-1)) + 1)


def _unpacked(
    read: Callable[[slice], np.ndarray], places: slice | np.ndarray, bits: int, axis: int, *, is_awq: bool = False
) -> np.ndarray:
    """Return the values at these places along a packed axis, of words that are read by slice along it."""
    each, cover = WORD // bits, _covering(places)
    words = slice(cover.start // each, -(-cover.stop // each))
    values = _unpack(read(words), bits, axis)
    if is_awq:
        order = (np.arange(values.shape[axis] // each)[:, None] * each + _AWQ_ORDER).reshape(-1)
        values = np.take(values, order, axis)
    first = words.start * each
    if isinstance(places, slice):
        return np.take(values, np.arange(places.start - first, places.stop - first), axis)
    return np.take(values, places - first, axis)


@dataclass(frozen=True)
class _Grouped:
    """A matrix of whole numbers, from which a zero for each group of inputs is taken before the scale multiplies, or an
    offset added after it."""

    shape: tuple[int, int]  # out, in
    num_groups: int
    block: int  # inputs of a group
    values: Callable[[slice | np.ndarray, slice], np.ndarray]  # of outputs and inputs [out, in] int32
    zeros: Callable[[slice | np.ndarray, slice], np.ndarray] | None  # of outputs and groups [out, group] int32
    scales: Callable[[slice | np.ndarray, slice], np.ndarray]  # the same, floats
    group_of: np.ndarray | None = None  # [in], of each input; None: groups of inputs that follow each other
    fits_8_bits: bool = True
    offsets: Callable[[slice | np.ndarray, slice], np.ndarray] | None = None  # like scales

    def open(self) -> LazyTensor | LazyQuantized:
        if self.group_of is not None or not self.fits_8_bits:
            return LazyTensor(self.shape, FLOAT32, self._read, is_widened=True)
        values = LazyTensor(self.shape, np.dtype(np.int8), lambda index: self._whole(index).astype(np.int8))

        def floats(read: Callable[..., np.ndarray]) -> LazyTensor:
            return LazyTensor((self.shape[0], self.num_groups), FLOAT32, lambda i: read(*i).astype(np.float32))

        offset = self.offsets and floats(self.offsets)
        return LazyQuantized(values, floats(self.scales), self.block, offset)

    def _groups(self, inputs: slice) -> tuple[slice, np.ndarray]:
        """Return the groups to read for some inputs, and which of them each input is of."""
        if self.group_of is not None:
            return slice(0, self.num_groups), self.group_of[inputs]
        groups = blocks_of(inputs, self.block)
        return groups, np.arange(inputs.start, inputs.stop) // self.block - groups.start

    def _whole(self, index: Index) -> np.ndarray:
        places, inputs = index
        values = self.values(places, inputs)
        if self.zeros is not None:
            groups, of_input = self._groups(inputs)
            values = values - self.zeros(places, groups)[:, of_input]
        return values

    def _read(self, index: Index) -> np.ndarray:
        places, inputs = index
        groups, of_input = self._groups(inputs)
        value = self._whole(index).astype(np.float32) * self.scales(places, groups).astype(np.float32)[:, of_input]
        return value + self.offsets(places, groups).astype(np.float32)[:, of_input] if self.offsets else value


def _open_awq(parts: _Parts, base: str, storing: Storing) -> Opened:
    weight, zeros, scales = (f"{base}.{part}" for part in ("qweight", "qzeros", "scales"))
    bits = storing.bits
    num_in, words = parts.shape(weight, _WORDS, (None, None), "[in, out / 8]")
    groups, _ = parts.shape(zeros, _WORDS, (None, words), "[groups, out / 8]")
    parts.shape(scales, _SCALES, (groups, words * WORD // bits), "[groups, out]")
    matrix = _Grouped(
        (words * WORD // bits, num_in),
        groups,
        storing.group_of(num_in, groups, parts.name),
        lambda out, ins: _unpacked(lambda w: parts.read(weight, (ins, w)), out, bits, 1, is_awq=True).T,
        lambda out, of: _unpacked(lambda w: parts.read(zeros, (of, w)), out, bits, 1, is_awq=True).T,
        lambda out, of: parts.read(scales, (of, out)).T,
    )
    return matrix.open(), (weight, zeros, scales)


def _open_gptq(parts: _Parts, base: str, storing: Storing) -> Opened:
    weight, zeros, scales, order = (f"{base}.{part}" for part in ("qweight", "qzeros", "scales", "g_idx"))
    bits = storing.bits
    words, num_out = parts.shape(weight, _WORDS, (None, None), f"[in / {WORD // bits}, out]")
    groups, _ = parts.shape(scales, _SCALES, (None, num_out), "[groups, out]")
    parts.shape(zeros, _WORDS, (groups, -(-num_out * bits // WORD)), f"[groups, out / {WORD // bits}]")
    num_in, made_of = words * WORD // bits, (weight, zeros, scales)
    # GPTQModel takes 1 from every zero by taking it from whole words, so a zero of 0 borrows from the next one
    step = np.uint32(sum(storing.zero_step << shift for shift in range(0, WORD, bits)))
    matrix = _Grouped(
        (num_out, num_in),
        groups,
        storing.group_of(num_in, groups, parts.name),
        lambda out, ins: _unpacked(lambda w: parts.read(weight, (w, out)), ins, bits, 0).T,
        lambda out, of: _unpacked(lambda w: parts.read(zeros, (of, w)).view(np.uint32) + step, out, bits, 1).T,
        lambda out, of: parts.read(scales, (of, out)).T,
        fits_8_bits=bits < 8,
    )
    if parts.has(order):
        parts.shape(order, _WORDS, (num_in,), "[in]")
        matrix, made_of = (
            _in_order(matrix, parts.read(order), f"{parts.tensors.file(order).name}: {order}"),
            (*made_of, order),
        )
    return matrix.open(), made_of


def _open_compressed(parts: _Parts, name: str, storing: Storing) -> Opened:
    bits = storing.bits
    packed, scales, shape, zeros, order = (
        f"{name}_{part}" for part in ("packed", "scale", "shape", "zero_point", "g_idx")
    )
    num_out, words = parts.shape(packed, _WORDS, (None, None), f"[out, in / {WORD // bits}]")
    num_in, made_of, half = words * WORD // bits, [packed, scales], 1 << (bits - 1)
    if parts.has(shape):
        parts.shape(shape, "int64 int32", (2,), "[2]")
        made_of.append(shape)
        stated = tuple(int(size) for size in parts.read(shape))
        if stated[0] != num_out or -(-stated[1] * bits // WORD) != words:
            raise CheckpointError(
                f"{parts.tensors.file(shape).name}: {shape} says {list(stated)}, which {packed} is not"
            )
        num_in = stated[1]
    _, groups = parts.shape(scales, _SCALES, (num_out, None), "[out, groups]")
    if has_zeros := parts.has(zeros):
        parts.shape(zeros, _WORDS, (-(-num_out * bits // WORD), groups), f"[out / {WORD // bits}, groups]")
        made_of.append(zeros)

    def of_zeros(out: slice | np.ndarray, of: slice) -> np.ndarray:
        return _unpacked(lambda w: parts.read(zeros, (w, of)), out, bits, 0) - half

    matrix = _Grouped(
        (num_out, num_in),
        groups,
        storing.group_of(num_in, groups, parts.name),
        lambda out, ins: _unpacked(lambda w: parts.read(packed, (out, w)), ins, bits, 1) - half,
        of_zeros if has_zeros else None,
        lambda out, of: parts.read(scales, (out, of)),
        fits_8_bits=bits < 8 or not has_zeros,
    )
    if parts.has(order):
        parts.shape(order, _WORDS, (num_in,), "[in]")
        made_of.append(order)
        matrix = _in_order(matrix, parts.read(order), f"{parts.tensors.file(order).name}: {order}")
    return matrix.open(), tuple(made_of)


def _in_order(matrix: _Grouped, group_of: np.ndarray, where: str) -> _Grouped:
    """Return the matrix with the groups that its inputs are stated to be of. All of them -1 stands for groups that
    follow each other."""
    if (group_of < 0).all() or np.array_equal(group_of, np.arange(len(group_of)) // matrix.block):
        return matrix
    if group_of.min() < 0 or group_of.max() >= matrix.num_groups:
        raise CheckpointError(f"{where} names groups from {group_of.min()} to {group_of.max()} of {matrix.num_groups}")
    return dataclasses.replace(matrix, group_of=group_of)


def _open_mlx(parts: _Parts, base: str, storing: Storing) -> Opened:
    bits = storing.bits
    weight, scales, biases = (f"{base}.{part}" for part in ("weight", "scales", "biases"))
    num_out, words = parts.shape(weight, "uint32", (None, None), f"[out, in / {WORD // bits}]")
    _, groups = parts.shape(scales, _SCALES, (num_out, None), "[out, groups]")
    parts.shape(biases, _SCALES, (num_out, groups), "[out, groups]")
    num_in = words * WORD // bits
    matrix = _Grouped(
        (num_out, num_in),
        groups,
        storing.group_of(num_in, groups, parts.name),
        lambda out, ins: _unpacked(lambda w: parts.read(weight, (out, w)), ins, bits, 1),
        None,
        lambda out, of: parts.read(scales, (out, of)),
        fits_8_bits=bits < 8,
        offsets=lambda out, of: parts.read(biases, (out, of)),
    )
    return matrix.open(), (weight, scales, biases)


def _open_nvfp4(parts: _Parts, name: str) -> Opened:
    """Open a weight as whole numbers, which are twice its 4-bit floats, and half of its scales."""
    is_packed = parts.has(f"{name}_global_scale")
    values, scales = f"{name}_packed" if is_packed else name, f"{name}_scale"
    whole = f"{name}_global_scale" if is_packed else f"{name}_scale_2"
    num_out, num_bytes = parts.shape(values, "uint8", (None, None), "[out, in / 2]")
    shape = num_out, 2 * num_bytes
    parts.shape(scales, "float8_e4m3fn", (num_out, -(-shape[1] // NVFP4_BLOCK)), f"[out, in / {NVFP4_BLOCK}]")
    factor = parts.read(whole).astype(np.float32).reshape(-1)
    if len(factor) != 1 or not np.isfinite(factor[0]) or factor[0] <= 0:
        raise CheckpointError(f"{parts.tensors.file(whole).name}: {whole} is {factor.tolist()}, expected one scale")

    def read_values(index: Index) -> np.ndarray:
        places, inputs = index
        pairs = fp4_values(parts.read(values, (places, blocks_of(inputs, 2))))
        first = inputs.start - inputs.start // 2 * 2
        return pairs[:, first : first + inputs.stop - inputs.start]

    def read_scale(index: Index) -> np.ndarray:
        of_blocks = parts.read(scales, index).astype(np.float32)
        return (of_blocks / factor if is_packed else of_blocks * factor) * np.float32(0.5)

    scale = LazyTensor(parts.tensors.shape(scales), FLOAT32, read_scale)
    return LazyQuantized(LazyTensor(shape, np.dtype(np.int8), read_values), scale, NVFP4_BLOCK), (values, scales, whole)
