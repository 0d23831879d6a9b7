import gc
import os
from pathlib import Path

import pyarrow
import pytest

from workbench.base.errors import ConfigurationError
from workbench.models.load import load_tokenizer
from workbench.models.source import locate
from workbench.techniques import DataLoading, Padding
from workbench.texts import corpus
from workbench.training.trainer import prepare_data


def test_device_memory_does_not_change(recipe, fine_tuned, subtests):
    """But for a batch of 8 × 32 ids and labels: the tracker does not see the birth of what a worker has made."""
    plain, batch = fine_tuned(recipe), 2 * 8 * 32 * 8
    for loading in (DataLoading(), DataLoading(num_workers=0), DataLoading(memory_mapped=False, num_workers=1)):
        with subtests.test(loading=loading):
            assert abs(fine_tuned(recipe | loading).peak_allocated_bytes - plain.peak_allocated_bytes) <= batch


@pytest.fixture
def data(recipe):
    """The data of a recipe, as the Trainer gets it."""
    tokenizer = load_tokenizer(locate(recipe.model))

    def prepared(technique):
        asked = recipe | technique
        blocks = corpus.make_blocks(corpus.load_corpus(asked.corpus), tokenizer, asked.sequence_length, 8)
        return blocks, prepare_data(asked, blocks)["train_dataset"]

    return prepared


def test_mapped_blocks_are_the_same_rows_in_a_file_that_goes_with_them(data):
    blocks, mapped = data(DataLoading())
    (file,) = (Path(entry["filename"]) for entry in mapped.cache_files)
    assert not blocks.train.cache_files
    assert mapped["input_ids"][:] == blocks.train["input_ids"][:]
    assert file.stat().st_size > 4 * 32 * len(mapped)  # int32, T = 32
    del mapped
    gc.collect()
    assert not file.exists()


def test_mapped_blocks_take_none_of_arrows_memory(data):
    before = pyarrow.total_allocated_bytes()
    blocks, mapped = data(DataLoading())
    of_both = pyarrow.total_allocated_bytes() - before
    rows, train_bytes = len(mapped), blocks.train.data.nbytes
    del blocks
    assert len(mapped["input_ids"][0]) == 32
    assert train_bytes >= 4 * 32 * rows  # int32, T = 32
    assert of_both - (pyarrow.total_allocated_bytes() - before) >= train_bytes
    assert pyarrow.total_allocated_bytes() - before < 0.1 * train_bytes


def test_workers_make_the_batches(recipe):
    """The batches come from other processes, as many as asked for."""
    from torch.utils.data import DataLoader

    arguments = DataLoading(num_workers=2).training_arguments({})
    loader = DataLoader(list(range(4)), num_workers=arguments["dataloader_num_workers"], collate_fn=_process)
    assert len(set(loader) - {os.getpid()}) == 2


def _process(_rows):
    return os.getpid()


def test_settings_that_change_nothing_are_refused():
    with pytest.raises(ConfigurationError, match="this is how every recipe loads its data"):
        DataLoading(memory_mapped=False, num_workers=0)


def test_other_examples_have_rows_to_map_too(recipe, fine_tuned):
    assert fine_tuned(recipe | Padding() | DataLoading()).losses == fine_tuned(recipe | Padding()).losses
