import json
import re

import pytest

from workbench.base.errors import ConfigurationError
from workbench.base.paths import DATA
from workbench.gpus.catalogue import GPUS, gpu

GIB, MIB = 2**30, 2**20
ASKED_FOR = (
    "t4 l4 a10 a100-40gb a100-80gb l40s h100 h200 b200 rtx3060 rtx3070 rtx3080 rtx3090 rtx4060 rtx4060ti-16gb rtx4070 "
    "rtx4080 rtx4090 rtx5070 rtx5080 rtx5090"
)


def test_the_usual_ones_are_there():
    assert set(ASKED_FOR.split()) == set(GPUS)


def test_every_row_has_its_source_and_pytorch_a_little_less_memory_than_the_data_sheet_says(subtests):
    for name, row in GPUS.items():
        with subtests.test(gpu=name):
            marketed = int(row.data_sheet.split()[0])
            assert 0.9 * marketed * 1e9 < row.memory_bytes < marketed * GIB
            assert re.search(r"https://\S+|data/reference/\S+", row.source)
            assert row.measured == ("message" in row.source or "read off" in row.source)
            assert row.name == name
            assert gpu(name) is row


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
            assert row.native_bf16 is row.flash_attention is bf16
            assert row.cublas_workspace_bytes == workspace
            assert 0.3 * GIB <= row.context_bytes_estimate <= 0.8 * GIB


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_a_card_is_as_one_of_its_kind_was_measured(name):
    one = json.loads((DATA / "reference" / name / "card.json").read_text(encoding="utf-8"))
    row = gpu(name)
    assert (row.memory_bytes, row.multiprocessors) == (one["memory_bytes"], one["multiprocessors"])
    assert list(row.compute_capability) == one["compute_capability"]
    assert row.context_bytes_estimate == one["context_bytes"]["after a training step"]
    of = row.multiprocessor
    assert (of.threads, of.shared_bytes) == (one["threads_per_multiprocessor"], one["shared_bytes_per_multiprocessor"])
    assert of.shared_bytes_of_a_block == one["shared_bytes_per_block"]


def test_a_name_may_be_written_as_people_do(subtests):
    for written in ("rtx4090", "RTX 4090", "rtx-4090", "RTX_4090"):
        with subtests.test(written=written):
            assert gpu(written).name == "rtx4090"


def test_the_beginning_of_several_names_is_refused_with_those():
    with pytest.raises(ConfigurationError, match=r"^gpu: 'A100' may be a100-40gb or a100-80gb\. Name one\.$"):
        gpu("A100")


def test_an_unknown_gpu_is_refused_with_the_known_ones(subtests):
    for name in ("gtx1080", "titan", ""):
        with subtests.test(name=name):
            with pytest.raises(ConfigurationError) as caught:
                gpu(name)
            assert f"gpu: there is no {name!r}. Known: t4, l4, a10, a100-40gb, a100-80gb" in str(caught.value)
