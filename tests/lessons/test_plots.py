from matplotlib.colors import to_hex

from tests.advise.test_compare import record
from workbench.advise.frame import to_frame
from workbench.base.categories import Category
from workbench.lessons import plots

MIB = 2**20


def sized(label, **sizes):
    return record(label, peak=sum(sizes.values()), by_category=sizes)


def test_bars_are_as_long_as_the_bytes():
    figure = plots.memory_bars(
        to_frame([sized("baseline", weights=MIB, logits_and_loss=3 * MIB), sized("lora", weights=MIB)])
    )
    axes = figure.axes[0]
    widths = {to_hex(bar.get_facecolor()).upper(): bar.get_width() for bar in axes.containers[1]}
    assert widths[plots.COLOURS[Category.LOGITS_AND_LOSS]] in (3.0, 0.0)
    assert [bar.get_width() for bar in axes.containers[0]] == [1.0, 1.0]
    assert [bar.get_width() for bar in axes.containers[1]] == [3.0, 0.0]
    assert [text.get_text().strip() for text in axes.texts] == ["4.0 MiB", "1.0 MiB"]


def test_a_limit_is_a_line_with_its_bytes():
    assert not plots.memory_bars(to_frame([record()])).axes[0].lines
    figure = plots.memory_bars(to_frame([sized("baseline", weights=4 * MIB)]), limit_bytes=3 * MIB)
    (line,) = figure.axes[0].lines
    assert line.get_xdata() == [3.0, 3.0]
    assert "limit 3.0 MiB" in {text.get_text() for text in figure.legends[0].get_texts()}


def test_the_axis_says_where_the_bytes_come_from():
    assert "cpu-tracker" in plots.memory_bars(to_frame([record()])).axes[0].get_xlabel()


def test_curves_show_the_mean_over_seeds_and_start_at_step_one():
    figure = plots.loss_curves([record(losses=[4.0, 2.0]), record(seed=1, losses=[6.0, 4.0])])
    (line,) = figure.axes[0].lines
    assert line.get_xdata().tolist() == [1, 2]
    assert line.get_ydata().tolist() == [5.0, 3.0]


def test_a_picture_of_nothing_has_words_too():
    figure = plots.loss_curves([record(losses=[])])
    assert figure.description.startswith("no losses on record")


def test_a_run_that_left_no_losses_has_no_curve():
    figure = plots.loss_curves([record(losses=[4.0, 2.0]), record("lora", losses=[])])
    assert len(figure.axes[0].lines) == 1
    assert figure.description == "Curves of the training loss: baseline from 4.00 to 2.00."


def test_every_category_has_its_own_colour():
    assert set(plots.COLOURS) == set(Category)
    assert len(set(plots.COLOURS.values())) == len(Category)


def test_pictures_read_on_light_and_dark_pages():
    figure = plots.memory_bars(to_frame([record()]))
    assert figure.get_facecolor()[3] == 0
    assert figure.axes[0].get_facecolor()[3] == 0
