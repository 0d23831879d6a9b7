"""A model of PyTorch's CUDA caching allocator: the same requests give the same blocks and segments, without a GPU.

`torch.cuda.memory_allocated` counts *blocks* and `memory_reserved` counts *segments*; both differ from the bytes that
tensors asked for. The rules are those of PyTorch's source, `c10/cuda/CUDACachingAllocator.cpp` (`malloc`,
`get_free_block`, `should_split`, `get_allocation_size`, `try_merge_blocks`, `release_cached_blocks`; for expandable
segments `map_block` and `unmap_block`) with the sizes of `c10/core/AllocatorConfig.h` and all settings at their
defaults but the one offered here. It has one stream and no CUDA graphs.

Among free blocks of equal size PyTorch takes the one in the older segment from 2.13 on (its pull request 183591), and
took the one at the lower address before, which only the driver decides. Here a newer segment has a higher address, so
that both are the same.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Any

from workbench.gpus.catalogue import ENOUGH_BYTES, MIB

SMALLEST_BLOCK_BYTES = 512  # kMinBlockSize: every request is rounded up to a multiple of it
SMALL_REQUEST_BYTES = 1 * MIB  # kSmallSize: the largest request of the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer: the segment that small requests share
LARGE_SEGMENT_BYTES = 20 * MIB  # large_segment_size: the segment that requests below OWN_SEGMENT_BYTES share
OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc: the least request that gets a segment of its own
SEGMENT_STEP_BYTES = 2 * MIB  # kRoundLarge: the size of such a segment is rounded up to a multiple of it


class OutOfCapacity(Exception):  # noqa: N818  # what happened, in the words of a planner, not a fault
    """A request that does not fit even after the cached segments were given back."""


def round_size(nbytes: int) -> int:
    """Return the bytes of the block that a request of `nbytes` > 0 gets, if the block is cut to measure."""
    return -(-nbytes // SMALLEST_BLOCK_BYTES) * SMALLEST_BLOCK_BYTES


def segment_size(size: int) -> int:
    """Return the bytes of the segment that is asked of the driver for a block of `size` bytes."""
    if size <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES


@dataclass(slots=True, eq=False)
class _Block:
    """A piece of a segment; `previous` and `following` are its neighbours in that segment."""

    address: int
    size: int
    pool: "_Pool"
    previous: "_Block | None" = None
    following: "_Block | None" = None
    used: bool = False
    mapped: bool = True  # False if its addresses have no memory behind them, which only an expandable segment has


@dataclass(slots=True, eq=False)
class _Pool:
    """The free blocks of one pool, by size and then address; the unmapped ones by address."""

    small: bool
    free: list[Any] = field(default_factory=list)  # (size, address, block)
    unmapped: list[Any] = field(default_factory=list)  # (address, block)

    @property
    def page_bytes(self) -> int:
        """The bytes by which an expandable segment grows."""
        return SMALL_SEGMENT_BYTES if self.small else LARGE_SEGMENT_BYTES

    def put(self, block: _Block) -> None:
        insort(*self._place(block))

    def take(self, block: _Block) -> None:
        blocks, entry = self._place(block)
        del blocks[bisect_left(blocks, entry)]

    def _place(self, block: _Block) -> tuple[list[Any], tuple[Any, ...]]:
        if block.mapped:
            return self.free, (block.size, block.address, block)
        return self.unmapped, (block.address, block)


class CachingAllocator:
    """Blocks in segments, like `torch.cuda`'s allocator, and its two pairs of numbers.

    Args:
        capacity_bytes: the most that the driver gives; None for any amount.
        expandable_segments: as with `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`.
        device_bytes: the whole memory of the GPU, the part of CUDA's context included. An expandable segment has
            addresses for an eighth more.
    """

    def __init__(
        self,
        capacity_bytes: int | None = None,
        expandable_segments: bool = False,
        device_bytes: int = ENOUGH_BYTES,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.expandable_segments = expandable_segments
        self.device_bytes = device_bytes
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0
        self._small = _Pool(small=True)
        self._large = _Pool(small=False)
        self._blocks: dict[int, _Block] = {}
        self._last_handle = 0
        self._next_address = 0

    def malloc(self, nbytes: int) -> int:
        """Allocate a block, and return its handle; 0, as PyTorch's null pointer, for no bytes at all.

        Raises:
            OutOfCapacity: the block does not fit, although every cached segment that is not split was given back.
        """
        if nbytes <= 0:
            return 0
        size = round_size(nbytes)
        pool = self._small if size <= SMALL_REQUEST_BYTES else self._large
        block = self._best_fit(pool, size) or self._grow(pool, size)
        if block is None:
            self.empty_cache()
            block = self._grow(pool, size)
        if block is None:
            used = f"{self.allocated_bytes:,} allocated and {self.reserved_bytes:,} reserved"
            raise OutOfCapacity(f"{size:,} bytes do not fit: {used} of {self.capacity_bytes:,}")
        self._split(block, size)
        block.used = True
        self.allocated_bytes += block.size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        self._last_handle += 1
        self._blocks[self._last_handle] = block
        return self._last_handle

    def free(self, handle: int) -> None:
        """Give a block back to its pool, merged with free neighbours. Raises KeyError for a handle not in use."""
        if handle == 0:
            return
        block = self._blocks.pop(handle)
        block.used = False
        self.allocated_bytes -= block.size
        self._merge(block)
        block.pool.put(block)

    def empty_cache(self) -> None:
        """Give memory that no block uses back to the driver: whole segments, or whole pages of an expandable one."""
        for pool in (self._large, self._small):
            for _, _, block in tuple(pool.free):
                if self.expandable_segments:
                    self._unmap(block)
                elif block.previous is None and block.following is None:
                    pool.take(block)
                    self.reserved_bytes -= block.size

    def _best_fit(self, pool: _Pool, size: int) -> _Block | None:
        """Take the smallest free block that is large enough, or return None. In an expandable segment, the next larger
        block is taken instead as long as it can grow less."""
        index = bisect_left(pool.free, (size,))
        if index == len(pool.free):
            return None
        block: _Block = pool.free[index][2]
        if self.expandable_segments:
            for _, _, other in pool.free[index + 1 :]:
                if _largest_size(other) >= _largest_size(block):
                    break
                block = other
        pool.take(block)
        return block

    def _split(self, block: _Block, size: int) -> None:
        """Cut the block to `size`, unless so little would remain that it stays in the block and counts as allocated."""
        rest = block.size - size
        if block.pool.small or self.expandable_segments:
            is_worth_it = rest >= SMALLEST_BLOCK_BYTES
        else:
            is_worth_it = rest > SMALL_REQUEST_BYTES
        if is_worth_it:
            self._cut(block, size)

    def _cut(self, block: _Block, size: int) -> None:
        """Keep the first `size` bytes in `block`; the rest becomes a block of its own in the pool."""
        rest = _Block(
            block.address + size,
            block.size - size,
            block.pool,
            previous=block,
            following=block.following,
            mapped=block.mapped,
        )
        if rest.following:
            rest.following.previous = rest
        block.following = rest
        block.size = size
        block.pool.put(rest)

    def _merge(self, block: _Block) -> None:
        """Swallow free neighbours. The block itself must not be in the pool."""
        for other in (block.previous, block.following):
            if other and not other.used and other.mapped == block.mapped:
                block.pool.take(other)
                block.size += other.size
                if other is block.following:
                    block.following = other.following
                else:
                    block.address = other.address
                    block.previous = other.previous
        if block.previous:
            block.previous.following = block
        if block.following:
            block.following.previous = block

    def _reserve(self, nbytes: int) -> bool:
        """Ask the driver for memory, and return whether it gives it."""
        if self.capacity_bytes is not None and self.reserved_bytes + nbytes > self.capacity_bytes:
            return False
        self.reserved_bytes += nbytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        return True

    def _grow(self, pool: _Pool, size: int) -> _Block | None:
        """Return a block of memory that the driver gives now, which is not in the pool; None if it gives none."""
        if self.expandable_segments:
            return self._expand(pool, size)
        nbytes = segment_size(size)
        if not self._reserve(nbytes):
            return None
        return _Block(self._take_addresses(nbytes), nbytes, pool)

    def _take_addresses(self, nbytes: int) -> int:
        self._next_address += nbytes
        return self._next_address - nbytes

    # ---- expandable segments: each pool has one, which is mapped page by page ----

    def _expand(self, pool: _Pool, size: int) -> _Block | None:
        """Map pages at the lowest address where `size` bytes fit, together with a free block right before."""
        block = self._find_addresses(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            following = block.following
            assert following is not None
            if not self._map(following, min(size - block.size, following.size)):
                return None
            block = following  # `_map` has merged the block before into the following one
        pool.take(block)
        return block

    def _find_addresses(self, pool: _Pool, size: int) -> _Block:
        """Return the first of the blocks that lie one after another, mapped or not, and have room for `size` bytes."""
        for _, unmapped in pool.unmapped:
            before = unmapped.previous
            start: _Block = unmapped
            if before and not before.used:
                start = before
            if _free_run(start) >= size:
                return start
        # A multiple of a large page is one of a small page too.
        nbytes = -(-self.device_bytes * 9 // 8 // LARGE_SEGMENT_BYTES) * LARGE_SEGMENT_BYTES
        whole = _Block(self._take_addresses(nbytes), nbytes, pool, mapped=False)
        pool.put(whole)
        return whole

    def _map(self, block: _Block, size: int) -> bool:
        """Put whole pages behind the beginning of an unmapped block, and the block, merged, into the pool. Returns
        whether the driver gave them."""
        nbytes = -(-size // block.pool.page_bytes) * block.pool.page_bytes
        if not self._reserve(nbytes):
            return False
        block.pool.take(block)
        if nbytes < block.size:
            self._cut(block, nbytes)
        block.mapped = True
        self._merge(block)
        block.pool.put(block)
        return True

    def _unmap(self, block: _Block) -> None:
        """Give the whole pages inside a free block back; the rest of the block on either side stays in the pool."""
        page = block.pool.page_bytes
        end = block.address + block.size
        first = -(-block.address // page) * page
        last = end // page * page
        if first >= last:
            return
        block.pool.take(block)
        if first > block.address:
            self._cut(block, first - block.address)
            block.pool.put(block)
            assert block.following is not None
            block = block.following
            block.pool.take(block)
        if last < end:
            self._cut(block, last - first)
        block.mapped = False
        self.reserved_bytes -= block.size
        self._merge(block)
        block.pool.put(block)


def _largest_size(block: _Block) -> int:
    """Return the bytes that a block of an expandable segment could grow to."""
    after = block.following
    if after and not after.mapped:
        return block.size + after.size
    return block.size


def _free_run(block: _Block | None) -> int:
    """Return the bytes of address space from a block on, up to the next block in use."""
    total = 0
    while block and not block.used:
        total += block.size
        block = block.following
    return total
