"""What other engines and papers call schedules, in letters and digits alone, and what we do.

torch's classes may have Schedule in front. A note says where ours is only the nearest.
"""

import difflib
import re
from collections.abc import Collection

# The names that have one of ours, and what to say of some names besides.
ALSO_KNOWN_AS = {
    # torch.distributed.pipelining; its others are ours in plain letters
    "1f1b": "pipedream_flush",
    "interleaved1f1b": "interleaved",
    "interleavedzerobubble": "zb_interleaved",
    "zbvzerobubble": "zb_v",
    # Megatron-LM
    "megatron": "interleaved",
    "virtualpipeline": "interleaved",
    "forwardbackwardpipeliningwithinterleaving": "interleaved",
    "forwardbackwardpipeliningwithoutinterleaving": "pipedream_flush",
    # DeepSpeed's TrainSchedule
    "train": "pipedream_flush",
    # Alpa, JaxPP, torchgpipe, picotron, ColossalAI, papers
    "1f1boverlapfriendly": "eager_1f1b",
    "std1f1b": "pipedream_flush",
    "dapple": "pipedream_flush",
    "afab": "gpipe",
    "filldrain": "gpipe",
    "bfs": "looped_bfs",
    "breadthfirst": "looped_bfs",
    "depthfirst": "interleaved",
    "2bw": "pipedream_2bw",
    "zerobubble": "zb_h1",
    "zb1p": "zb",
    "zb2p": "zb",
    "zbv": "zb_v",
    "naive": "inter_layer",
    "kimik2": "overlapped_1f1b",
    "slimpipe": "seq1f1b",
}
NOTES = {
    **dict.fromkeys(
        ("pipelineschedulesingle", "pipelineschedulemulti", "pipelinescheduleruntime"),
        "That class runs any table: give a CSV file",
    ),
    "hanayo": "Its waves are a placement of a search, such as pipelab.optimize.order.search("
    "Costs(), 2, 2, placement=[0, 1, 1, 0] * waves, split=False)",
    "inference": "Every schedule's forwards run alone by pipelab.evaluate",
    "slimpipe": "Its order; devices do not share attention, which Costs(attention=0) simulates",
    "zerobubble": "The plainest: zb and zb_v are made for your costs and memory",
    "zb1p": "Give it memory=devices",
    "zb2p": "Give it memory=2 * devices",
}


def other_name(name: str, ours: Collection[str]) -> str:
    """What to give instead of a name that is not ours, as a part of an error; may be empty."""

    def plain(text: str) -> str:
        text = re.sub("[^a-z0-9]", "", text.lower())
        return text.removeprefix("schedule").removesuffix("schedule")

    known = {plain(each): each for each in ours} | ALSO_KNOWN_AS
    called, note = plain(name), "That is its name here"
    if called not in known | NOTES:
        near = difflib.get_close_matches(called, known | NOTES, 1)
        called, note = near[0] if near else "", ""
    found, note = known.get(called), NOTES.get(called, note)
    hint = f"did you mean {found}? " if found else ""
    return f"{hint}{note}. " if note else hint
