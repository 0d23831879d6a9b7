"""Sequences computed by hand from the rules of c10/cuda/CUDACachingAllocator.cpp; and what holds for any sequence."""

from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.gpus.caching_allocator import CachingAllocator, OutOfCapacity, round_size, segment_size
from workbench.gpus.catalogue import KIB, MIB


def numbers(allocator):
    return allocator.allocated_bytes, allocator.reserved_bytes


def blocks(allocator):
    """(address, size, used) of every block, used ones first."""
    used = [(block.address, block.size, True) for block in allocator._blocks.values()]
    free = [(address, size, False) for pool in (allocator._small, allocator._large) for size, address, _ in pool.free]
    return used + free


BLOCKS = {1: 512, 512: 512, 513: 1024, 1000: 1024, 10**6: 1_000_448}


def test_requests_round_up_to_512_bytes(subtests):
    for nbytes, block in BLOCKS.items():
        with subtests.test(nbytes=nbytes):
            allocator = CachingAllocator()
            allocator.malloc(nbytes)
            assert round_size(nbytes) == block
            assert numbers(allocator) == (block, 2 * MIB)


SEGMENTS = {
    512: 2 * MIB,
    MIB: 2 * MIB,  # the largest small request
    MIB + 512: 20 * MIB,
    10 * MIB - 512: 20 * MIB,
    10 * MIB: 10 * MIB,  # from here on a segment of its own
    10 * MIB + 512: 12 * MIB,
    100 * MIB: 100 * MIB,
}


def test_segments(subtests):
    for size, segment in SEGMENTS.items():
        with subtests.test(size=size):
            allocator = CachingAllocator()
            allocator.malloc(size)
            assert segment_size(size) == allocator.reserved_bytes == segment


def test_no_bytes_need_no_block():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(0))
    assert numbers(allocator) == (0, 0)


def test_small_requests_share_a_segment_until_it_is_full():
    allocator = CachingAllocator()
    for _ in range(4):
        allocator.malloc(512 * KIB)
    assert numbers(allocator) == (2 * MIB, 2 * MIB)
    allocator.malloc(1)
    assert numbers(allocator) == (2 * MIB + 512, 4 * MIB)


def test_small_and_large_requests_never_share_a_segment():
    allocator = CachingAllocator()
    allocator.malloc(2 * MIB)  # leaves 18 MiB of its segment free
    allocator.malloc(MIB)
    assert numbers(allocator) == (3 * MIB, 22 * MIB)


def test_middling_requests_share_twenty_mebibytes():
    allocator = CachingAllocator()
    for _ in range(3):
        allocator.malloc(6 * MIB)
    assert numbers(allocator) == (18 * MIB, 20 * MIB)
    allocator.malloc(6 * MIB)  # 2 MiB are left
    assert numbers(allocator) == (24 * MIB, 40 * MIB)


def test_a_large_block_keeps_a_rest_of_up_to_one_mebibyte_and_counts_it():
    allocator = CachingAllocator()
    allocator.malloc(11 * MIB)  # segment 12 MiB, rest exactly 1 MiB: not split
    assert numbers(allocator) == (12 * MIB, 12 * MIB)
    allocator.malloc(11 * MIB - 512)  # rest 1 MiB + 512: split
    assert numbers(allocator) == (23 * MIB - 512, 24 * MIB)


def test_a_small_block_is_split_down_to_512_bytes():
    allocator = CachingAllocator()
    allocator.malloc(MIB)
    allocator.malloc(MIB - 512)
    assert numbers(allocator) == (2 * MIB - 512, 2 * MIB)
    allocator.malloc(512)
    assert numbers(allocator) == (2 * MIB, 2 * MIB)


def test_the_best_fitting_free_block_is_taken():
    allocator = CachingAllocator()
    wide, narrow = allocator.malloc(40 * MIB), allocator.malloc(32 * MIB)
    allocator.free(wide)
    allocator.free(narrow)
    allocator.malloc(32 * MIB)  # fits into the 32 exactly; had it split the 40, the next would need a new segment
    allocator.malloc(40 * MIB)
    assert numbers(allocator) == (72 * MIB, 72 * MIB)


def test_a_much_larger_free_block_is_split_rather_than_a_new_segment_made():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(100 * MIB))
    allocator.malloc(12 * MIB)
    allocator.malloc(88 * MIB)
    assert numbers(allocator) == (100 * MIB, 100 * MIB)


def test_free_neighbours_merge_in_whatever_order_they_are_freed(subtests):
    for order in permutations(range(3)):
        with subtests.test(order=order):
            allocator = CachingAllocator()
            handles = [allocator.malloc(6 * MIB) for _ in range(3)]
            for which in order:
                allocator.free(handles[which])
            assert blocks(allocator) == [(0, 20 * MIB, False)]
            allocator.malloc(20 * MIB)
            assert numbers(allocator) == (20 * MIB, 20 * MIB)


def test_what_is_cached_stays_reserved_until_the_cache_is_emptied():
    allocator = CachingAllocator()
    kept, gone = allocator.malloc(6 * MIB), allocator.malloc(64 * MIB)
    allocator.free(gone)
    assert numbers(allocator) == (6 * MIB, 84 * MIB)
    allocator.empty_cache()
    assert numbers(allocator) == (6 * MIB, 20 * MIB)  # the segment that is partly in use cannot go
    allocator.free(kept)
    allocator.empty_cache()
    assert numbers(allocator) == (0, 0)


def test_peaks_stay():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(64 * MIB))
    allocator.empty_cache()
    allocator.malloc(16 * MIB)
    assert (allocator.peak_allocated_bytes, allocator.peak_reserved_bytes) == (64 * MIB, 64 * MIB)


def test_near_capacity_the_cache_is_given_back_and_the_request_tried_again():
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)
    assert numbers(allocator) == (80 * MIB, 80 * MIB)
    assert allocator.peak_reserved_bytes == 80 * MIB


def test_what_does_not_fit_even_then_is_refused_with_the_numbers_and_changes_nothing():
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    allocator.malloc(60 * MIB)
    words = "42,991,616 bytes do not fit: 62,914,560 allocated and 62,914,560 reserved of 104,857,600"
    with pytest.raises(OutOfCapacity, match=words):
        allocator.malloc(41 * MIB)
    assert numbers(allocator) == (60 * MIB, 60 * MIB)
    allocator.malloc(40 * MIB)


def test_fragments_do_not_serve_a_request_that_their_sum_could():
    """The usual disappointment: 60 of 100 MiB are free, in two pieces of segments that are partly in use."""
    allocator = CachingAllocator(capacity_bytes=100 * MIB)
    holes = []
    for _ in range(2):
        whole = allocator.malloc(50 * MIB)
        allocator.free(whole)
        holes.append(allocator.malloc(30 * MIB))
        allocator.malloc(20 * MIB)
    for hole in holes:
        allocator.free(hole)
    assert numbers(allocator) == (40 * MIB, 100 * MIB)
    with pytest.raises(OutOfCapacity):
        allocator.malloc(31 * MIB)


def test_a_handle_is_freed_once():
    allocator = CachingAllocator()
    handle = allocator.malloc(1)
    allocator.free(handle)
    with pytest.raises(KeyError):
        allocator.free(handle)


# ---- expandable segments: pages of 2 MiB for the small pool, of 20 MiB for the large one ----


def test_an_expandable_segment_grows_by_pages_and_is_cut_to_measure():
    allocator = CachingAllocator(expandable_segments=True)
    allocator.malloc(11 * MIB)
    assert numbers(allocator) == (11 * MIB, 20 * MIB)
    allocator.malloc(9 * MIB)
    assert numbers(allocator) == (20 * MIB, 20 * MIB)
    allocator.malloc(21 * MIB)
    assert numbers(allocator) == (41 * MIB, 60 * MIB)


def test_an_expandable_segment_appends_to_a_free_end():
    allocator = CachingAllocator(expandable_segments=True)
    allocator.malloc(15 * MIB)  # 5 MiB free at the end
    allocator.malloc(25 * MIB)  # 20 more are mapped, not 40
    assert numbers(allocator) == (40 * MIB, 40 * MIB)


def test_a_growing_batch_leaves_no_fragments_in_an_expandable_segment():
    """The case expandable segments were made for: each request a little larger than the one before."""
    plain, expandable = CachingAllocator(), CachingAllocator(expandable_segments=True)
    for allocator in (plain, expandable):
        for nbytes in range(100 * MIB, 200 * MIB, 20 * MIB):
            allocator.free(allocator.malloc(nbytes))
    assert plain.reserved_bytes == sum(range(100 * MIB, 200 * MIB, 20 * MIB))
    assert expandable.reserved_bytes == 180 * MIB


def test_whole_pages_of_an_expandable_segment_are_given_back_and_mapped_again():
    allocator = CachingAllocator(expandable_segments=True)
    first, middle, _ = allocator.malloc(10 * MIB), allocator.malloc(60 * MIB), allocator.malloc(10 * MIB)
    assert numbers(allocator) == (80 * MIB, 80 * MIB)
    allocator.free(middle)  # 10 to 70 MiB; the pages at 20 and 40 are wholly free
    allocator.empty_cache()
    assert numbers(allocator) == (20 * MIB, 40 * MIB)
    allocator.malloc(55 * MIB)  # maps the two pages again, into the gap
    assert numbers(allocator) == (75 * MIB, 80 * MIB)
    allocator.free(first)
    assert allocator.allocated_bytes == 65 * MIB


def test_an_expandable_segment_ends_at_capacity():
    allocator = CachingAllocator(capacity_bytes=50 * MIB, expandable_segments=True)
    allocator.malloc(39 * MIB)
    with pytest.raises(OutOfCapacity):
        allocator.malloc(2 * MIB)
    assert numbers(allocator) == (39 * MIB, 40 * MIB)


# ---- for any sequence of requests ----

SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(9 * MIB, 80 * MIB))
EVENTS = st.lists(st.one_of(SIZES, st.integers(-50, -1)), max_size=120)  # negative: free the n-th of those in use


@settings(deadline=None)
@given(EVENTS, st.booleans(), st.sampled_from([None, 200 * MIB]))
def test_invariants(events, expandable, capacity):
    allocator = CachingAllocator(capacity, expandable)
    live = {}
    for event in events:
        if event > 0:
            try:
                live[allocator.malloc(event)] = event
            except OutOfCapacity:
                assert capacity is not None
        elif live:
            handle = sorted(live)[event % len(live)]
            allocator.free(handle)
            del live[handle]
        found = sorted(blocks(allocator))
        assert all(one + size <= other for (one, size, _), (other, _, _) in pairwise(found))
        assert sum(size for _, size, _ in found) == allocator.reserved_bytes
        assert sum(size for _, size, used in found if used) == allocator.allocated_bytes
        assert sum(map(round_size, live.values())) <= allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.reserved_bytes <= (capacity or allocator.reserved_bytes)
        assert allocator.peak_allocated_bytes >= allocator.allocated_bytes
        assert allocator.peak_reserved_bytes >= allocator.reserved_bytes
    for handle in live:
        allocator.free(handle)
    assert allocator.allocated_bytes == 0
    allocator.empty_cache()
    assert numbers(allocator) == (0, 0)
    assert blocks(allocator) == []


@settings(deadline=None)
@given(st.lists(SIZES, min_size=1, max_size=40), st.randoms(use_true_random=False))
def test_everything_freed_merges_into_whole_segments_whatever_the_order(sizes, random):
    allocator = CachingAllocator()
    handles = [allocator.malloc(size) for size in sizes]
    reserved = allocator.reserved_bytes
    random.shuffle(handles)
    for handle in handles:
        allocator.free(handle)
    assert all(size in (2 * MIB, 20 * MIB, segment_size(size)) for _, size, _ in blocks(allocator))
    assert allocator.reserved_bytes == reserved
    allocator.empty_cache()  # gives back only segments that are one block
    assert numbers(allocator) == (0, 0)
