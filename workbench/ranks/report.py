"""The ranks of a run in words."""

from workbench.measure.categories import format_bytes
from workbench.records.record import Record


def ranks_text(record: Record) -> str:
    """The peak of each, where they are alike; or the highest and the lowest, and what makes the difference."""
    ordered = sorted(record.ranks, key=lambda facts: facts["peak_allocated_bytes"])
    low = ordered[0]
    high = ordered[-1]
    more = high["peak_allocated_bytes"] - low["peak_allocated_bytes"]
    head = f"{record.world_size}, shard {record.shard}: {format_bytes(high['peak_allocated_bytes'])}"
    if not more:
        return f"{head} on each"
    parts = {name: size - low["by_category"].get(name, 0) for name, size in high["by_category"].items()}
    most = max(parts, key=lambda name: parts[name])
    return (
        f"{head} on rank {high['rank']}, {format_bytes(more)} more than on rank {low['rank']}; "
        f"most of that is {most.replace('_', ' ')}"
    )
