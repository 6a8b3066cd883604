"""The explorer without a browser."""

from pipelab import make, simulate
from pipelab.widgets import Explorer, png


def test_moving_a_slider_changes_words_and_picture():
    explorer = Explorer()
    words, picture = explorer.words.value, bytes(explorer.image.value)
    assert words == simulate(make("gpipe", 4, 8)).summary()
    assert picture.startswith(b"\x89PNG")
    explorer.microbatches.value = 16
    assert explorer.timeline.schedule.microbatches == 16
    assert "16 micro-batches" in explorer.words.value
    assert bytes(explorer.image.value) != picture
    explorer.ratio.value = 1.0
    assert explorer.timeline.makespan == 19 * 2
    explorer.devices.value = 2
    assert explorer.timeline.schedule.devices == 2


def test_a_closed_notebook_shows_a_helpful_line():
    assert repr(Explorer("inter_layer")) == (
        "Explorer of inter_layer: three sliders over its timeline; run this notebook to move them"
    )


def test_pictures_do_not_pile_up():
    import matplotlib.pyplot as plt

    png(simulate(make("gpipe", 2, 2)))
    assert plt.get_fignums() == []
