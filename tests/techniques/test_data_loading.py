import os
from pathlib import Path

import pytest

from workbench.errors import ConfigurationError, UnavailableError
from workbench.measure.categories import Category
from workbench.models.load import load_tokenizer
from workbench.models.source import locate
from workbench.run.run import run
from workbench.run.trainer import prepare_data
from workbench.techniques import DataLoading, Padding, Streaming
from workbench.texts import corpus

KINDS = pytest.mark.parametrize(
    "loading",
    [DataLoading(), DataLoading(num_workers=0), DataLoading(memory_mapped=False, num_workers=1)],
    ids=["both", "mapped", "worker"],
)


@KINDS
def test_every_loss_is_the_same_to_the_last_bit(recipe, fine_tuned, loading):
    plain, loaded = fine_tuned(recipe), fine_tuned(recipe | loading)
    assert loaded.losses == plain.losses
    assert loaded.held_out_loss == plain.held_out_loss
    assert loaded.tokens_seen == plain.tokens_seen
    assert loaded.padding_tokens == plain.padding_tokens == 0


@KINDS
def test_device_memory_does_not_change(recipe, fine_tuned, loading):
    """But for a batch of 8 × 32 ids and labels: the tracker does not see the birth of what a worker has made."""
    plain, loaded = fine_tuned(recipe), fine_tuned(recipe | loading)
    batch = 2 * 8 * 32 * 8
    assert abs(loaded.peak_allocated_bytes - plain.peak_allocated_bytes) <= batch
    for category in Category:
        if category is not Category.TEMPORARIES:
            assert loaded.maximum_by_category[category] == plain.maximum_by_category[category]


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
    import gc

    blocks, mapped = data(DataLoading())
    (file,) = (Path(entry["filename"]) for entry in mapped.cache_files)
    assert not blocks.train.cache_files
    assert mapped["input_ids"][:] == blocks.train["input_ids"][:]
    assert file.stat().st_size > 4 * 32 * len(mapped)  # int32, T = 32
    del mapped
    gc.collect()
    assert not file.exists()


def test_mapped_blocks_take_none_of_arrows_memory(data):
    import pyarrow

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


def test_settings_that_change_nothing_are_refused(recipe):
    with pytest.raises(ConfigurationError, match="this is how every recipe loads its data"):
        DataLoading(memory_mapped=False, num_workers=0)
    with pytest.raises(UnavailableError, match=r"on this device \(cpu\) it never is. Leave pin_memory true"):
        run(recipe | DataLoading(pin_memory=False), device="cpu")


def test_pinning_can_be_switched_off():
    assert DataLoading(pin_memory=False).training_arguments({})["dataloader_pin_memory"] is False
    assert "dataloader_pin_memory" not in DataLoading().training_arguments({})
    assert DataLoading(pin_memory=False).missing("cuda") is None


def test_a_stream_has_no_rows_to_map_and_other_examples_have(recipe, fine_tuned):
    with pytest.raises(ConfigurationError, match="streaming brings a stream of examples"):
        recipe | Streaming() | DataLoading()
    padded = fine_tuned(recipe | Padding())
    assert fine_tuned(recipe | Padding() | DataLoading()).losses == padded.losses
