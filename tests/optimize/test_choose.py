"""The numbers of docs/choose.md, as the planner has them."""

from dataclasses import replace
from pathlib import Path

import pytest

from pipelab.optimize.plan import MACHINES, Problem, Transformer, plan

PAGE = " ".join((Path(__file__).parents[2] / "docs" / "choose.md").read_text().split())
SIZES = {"sequence": 2048, "vocabulary": 51200}
SMALL = Transformer(layers=24, hidden=2048, heads=16, **SIZES)
MIDDLE = Transformer(layers=32, hidden=4096, heads=32, **SIZES)
LARGE = Transformer(layers=48, hidden=8192, heads=64, **SIZES)
NODE = MACHINES["A100-80GB"]
ALONE = replace(NODE, node=1, inside=NODE.bandwidth)  # slow links: no two devices in one node


def best(model, devices, zero, machine=NODE, tensor=(1,)):
    one = Problem(model, machine, devices, 8 * devices, tensor, ("pipedream_flush",), zero=zero)
    return plan(one).best


@pytest.mark.parametrize(
    ("words", "model", "devices", "zero", "part"),
    [
        ("{:.0f} % of the step for 1.3 B parameters on eight", SMALL, 8, 0, "all-reduce"),
        ("{:.0f} % inside a node", MIDDLE, 8, 3, "ZeRO"),
        ("{:.0f} % over 64 devices", LARGE, 64, 3, "ZeRO"),
    ],
)
def test_what_replicas_alone_send(words, model, devices, zero, part):
    found = best(model, devices, zero)
    assert found.choice.replicas == devices
    assert words.format(100 * found.parts[part] / found.step) in PAGE


def test_over_slow_links_gathering_takes_longer_than_a_pipeline():
    assert "too long over slow links" in PAGE
    assert best(MIDDLE, 8, 3, ALONE).choice.pipeline > 1


def test_what_comes_later_is_rarely_faster_by_a_percent():
    assert "rarely faster by a percent" in PAGE
    alone, shared = best(MIDDLE, 8, 1), best(MIDDLE, 8, 1, tensor=(1, 2, 4, 8))
    assert 0.99 * alone.step < shared.step < alone.step


def test_what_eight_devices_that_share_layers_send():
    """Two all-reduces a layer and forward, each a ring's 2 * 7/8 of 2 bytes a number."""
    gpt3 = 96, 12288, 175e9, 6 * 175e9 * 2048 / 13.75  # layers, hidden, parameters, FLOP/s
    llama3 = 126, 16384, 405e9, 430e12
    links = (gpt3, 300e9, 25e9), (llama3, 450e9, 50e9)  # NVLink, a network card

    def share(layers, hidden, parameters, rate, link):
        sent = layers * 2 * (2 * 7 / 8) * 2 * hidden  # bytes a token
        return sent / link / (2 * parameters / 8 / rate)

    inside = [100 * share(*model, nvlink) for model, nvlink, _ in links]
    assert "{:.0f} to {:.0f} % of a forward over NVLink".format(*inside) in PAGE
    assert "more than the forward over a network card" in PAGE
    assert all(share(*model, card) > 1 for model, _, card in links)
