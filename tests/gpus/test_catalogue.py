import json
import re

import psutil
import pytest

from workbench.base.errors import ConfigurationError
from workbench.base.paths import DATA
from workbench.gpus.catalogue import COMMON, GPUS, device_name, gpu, recognize_gpu, room_bytes

GIB, MIB = 2**30, 2**20
ASKED_FOR = (
    "t4 l4 a10 a100-40gb a100-80gb l40s h100 h200 b200 rtx3060 rtx3070 rtx3080 rtx3090 rtx4060 rtx4060ti-16gb rtx4070 "
    "rtx4080 rtx4090 rtx5070 rtx5080 rtx5090"
)


ALSO = (
    "v100-16gb v100-32gb p100 a5000 a6000 l40 gh200 gb10 rtx2080ti rtx3080ti rtx4070ti-super rtx5060ti-16gb rtxpro6000 "
    "rtx2070-laptop rtx3060-laptop rtx4090-laptop rtx5080-laptop"
)


def test_the_usual_ones_are_there_and_stand_in_tables_and_others_may_be_named():
    assert set(ASKED_FOR.split()) == set(COMMON)
    assert set(ALSO.split()) <= set(GPUS) - set(COMMON)
    assert len(GPUS) >= 40


def test_every_row_has_its_source_and_pytorch_a_little_less_memory_than_the_data_sheet_says(subtests):
    for name, row in GPUS.items():
        with subtests.test(gpu=name):
            marketed = int(row.data_sheet.split()[0])
            assert 0.9 * marketed * 1e9 < row.memory_bytes < marketed * GIB
            assert re.search(r"https://\S+|data/reference/\S+", row.source)
            is_measured = "message" in row.source or "read off" in row.source
            assert is_measured == (not re.search(r"less [\d.]+ %", row.source))
            assert row.name == name
            assert gpu(name) is row


def test_a_context_has_a_source_and_is_a_guess_where_it_has_none(subtests):
    for name, row in GPUS.items():
        with subtests.test(gpu=name):
            low, high = row.context_bytes
            assert 0.1 * GIB < low <= high == row.context_bytes_estimate < GIB
            if row.context_source is None:
                assert low == high == 512 * MIB
                assert row.context_seen_bytes[0] < low < row.context_seen_bytes[1]
            else:
                assert re.search(r"https://\S+|data/reference/\S+", row.context_source)
                assert row.context_seen_bytes == (low, high)


def test_every_card_has_its_cache_and_its_source(subtests):
    """torch.compile reserves as much while it times kernels, and 256 MiB on a card that tells none."""
    for name, row in GPUS.items():
        with subtests.test(gpu=name):
            assert MIB <= row.l2_bytes <= 128 * MIB
            assert re.search(r"https://\S+|data/reference/\S+|deviceQuery", row.l2_source)


CAPABILITIES = (  # gpu, compute capability, bf16, cuBLAS's workspace
    ("t4", (7, 5), False, int(8.125 * MIB)),
    ("a100-80gb", (8, 0), True, int(8.125 * MIB)),
    ("rtx3090", (8, 6), True, int(8.125 * MIB)),
    ("l4", (8, 9), True, int(8.125 * MIB)),
    ("h100", (9, 0), True, 32 * MIB),
    ("b200", (10, 0), True, 32 * MIB),
    ("rtx5090", (12, 0), True, 32 * MIB),
)


def test_what_follows_from_the_compute_capability(subtests):
    for name, capability, bf16, workspace in CAPABILITIES:
        with subtests.test(gpu=name):
            row = gpu(name)
            assert row.compute_capability == capability
            assert row.device.computes_bf16 is bf16
            assert row.cublas_workspace_bytes == workspace
            assert 0.3 * GIB <= row.context_bytes_estimate <= 0.8 * GIB


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_a_card_is_as_one_of_its_kind_was_measured(name):
    one = json.loads((DATA / "reference" / name / "card.json").read_text(encoding="utf-8"))
    row = gpu(name)
    assert (row.memory_bytes, row.multiprocessors) == (one["memory_bytes"], one["multiprocessors"])
    assert list(row.compute_capability) == one["compute_capability"]
    assert row.l2_bytes == one["l2_bytes"]
    assert row.context_bytes[0] == one["context_bytes"]["after the first tensor"]
    assert row.context_bytes_estimate == one["context_bytes"]["after a training step"]
    of = row.multiprocessor
    assert (of.threads, of.shared_bytes) == (one["threads_per_multiprocessor"], one["shared_bytes_per_multiprocessor"])
    assert of.shared_bytes_of_a_block == one["shared_bytes_per_block"]


def test_a_name_may_be_written_as_people_do(subtests):
    for written in ("rtx4090", "RTX 4090", "rtx-4090", "RTX_4090"):
        with subtests.test(written=written):
            assert gpu(written).name == "rtx4090"


WRITTEN = {
    "4090": "rtx4090", "GeForce RTX 4090": "rtx4090", "nvidia geforce rtx 4090": "rtx4090", "A100 80GB": "a100-80gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb", "A100-PCIE-40GB": "a100-40gb", "Tesla T4": "t4", "T4 16GB": "t4",
    "NVIDIA H100 80GB HBM3": "h100", "RTX 3060 12 GB": "rtx3060", "4060 Ti 16GB": "rtx4060ti-16gb",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "rtx4090-laptop", "Tesla V100-SXM2-32GB": "v100-32gb", "RTX A6000": "a6000",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtxpro6000", "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
}  # fmt: skip


def test_so_is_what_a_shop_or_nvidia_smi_calls_it(subtests):
    for written, name in WRITTEN.items():
        with subtests.test(written=written):
            assert gpu(written).name == device_name(written) == name
    for row in GPUS.values():
        with subtests.test(written=row.title):
            assert gpu(row.title) is row
    assert device_name("CPU") == "cpu"


def test_what_is_no_such_card_is_not_taken_for_one(subtests):
    for written in (
        "RTX 4090 D",
        "RTX 4060 Ti 12GB",
        "H100 NVL",
        "A10G",
        "V100 24GB",
        "2x T4",
        "rtx",
        "T",
        "gb",
        4090,
    ):
        with subtests.test(written=written), pytest.raises(ConfigurationError, match=r"^gpu: "):
            gpu(written)
    with pytest.raises(ConfigurationError, match=r"RTX 3060 that is has 12 GB\. Name rtx3060"):
        gpu("RTX 3060 8GB")
    with pytest.raises(ConfigurationError, match=r"Did you mean rtx4090\?$"):
        gpu("RTX 4090 D")


def test_a_driver_may_say_more_than_a_name_of_the_catalogue():
    """A name that `gpu` refuses is recognised by its kind; of several rows the one with the nearest memory is taken."""
    assert recognize_gpu("NVIDIA H100 NVL", 99 * 10**9) == recognize_gpu("NVIDIA H100 NVL") == GPUS["h100"]
    assert recognize_gpu("NVIDIA A10G") == GPUS["a10"]
    assert recognize_gpu("NVIDIA GeForce RTX 4060 Ti", 16 * 10**9) == GPUS["rtx4060ti-16gb"]
    assert recognize_gpu("NVIDIA GeForce GTX 1080") is None
    assert recognize_gpu("NVIDIA GeForce GTX 1080", 8 * 10**9) in GPUS.values()


def test_the_room_is_the_limit_or_the_card_whichever_is_smaller():
    assert room_bytes("t4") == GPUS["t4"].memory_bytes
    assert room_bytes("t4", 16 * 10**9) == GPUS["t4"].memory_bytes
    assert room_bytes("t4", 8 * 2**30) == 8 * 2**30
    assert room_bytes("cpu", 2**60) == room_bytes("cpu") == psutil.virtual_memory().total
    assert room_bytes("cpu", 2**20) == 2**20


def test_the_beginning_of_several_names_is_refused_with_those():
    with pytest.raises(ConfigurationError, match=r"^gpu: 'A100' may be a100-40gb or a100-80gb\. Name one\.$"):
        gpu("A100")


def test_an_unknown_gpu_is_refused_with_the_known_ones(subtests):
    for name in ("gtx1080", "titan", ""):
        with subtests.test(name=name):
            with pytest.raises(ConfigurationError) as caught:
                gpu(name)
            assert f"gpu: there is no {name!r}. Known: t4, l4, a10, a100-40gb, a100-80gb" in str(caught.value)
