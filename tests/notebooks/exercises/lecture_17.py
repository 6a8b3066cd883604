"""Answers to the exercises of lecture 17: right ones, and wrong ones with a part of their hint."""

V_SLOWLY = """
0F0 0F1 3F0 3I0 0I0 0W0 3F1 3I1 3W0 3W1 0I1 0W1
1F0 2F0 1F1 2I0 1I0 1W0 2F1 2W0 2I1 1I1 1W1 2W1
"""
AT_ONCE = """
0F0 0F1 0I0 0W0 0I1 0W1
1F0 1I0 1F1 1I1 1W0 1W1
"""
LOOP = """
0F0 0F1 2F0 2F1 2I0 2I1 2W0 0I0 2W1 0I1 0W0 0W1
1F0 1F1 3F0 3I0 3F1 3I1 1I0 1I1 1W0 1W1 3W0 3W1
"""

ANSWERS = {
    "17-1": {
        "right": [
            'answer = pl.Schedule.from_grid("""\n'
            "0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0W0 0I1 3W1 0W1\n"
            '1F0 2F0 1F1 2F1 2I0 1I0 2W0 2I1 1I1 1W0 1W1 2W1\n""")',
        ],
        "wrong": {
            f"answer = '''{V_SLOWLY}'''": "must be at most 13",
            f"answer = '''{LOOP}'''": "Not yet",
            'answer = pl.make("zb_v", 2, 2)': "that is the library's zb_v",
            f"answer = pl.Schedule.from_grid('''{AT_ONCE}''')": "asks for 2 devices, 4 stages",
            "answer = None or 13": "is not a table",
        },
    },
    "17-2": {
        "right": [
            "answer = lambda p: [*range(p), *range(p)[::-1]] * 2",
            "def answer(p):\n    return np.array([min(s % (2 * p), 2 * p - 1 - s % (2 * p)) for s in range(4 * p)])",
            "answer = lambda p: [*range(p)[::-1], *range(p), *range(p), *range(p)[::-1]]",
        ],
        "wrong": {
            "answer = lambda p: [*range(p)] * 4": "hold [40, 32] units",
            "answer = lambda p: [*range(p), *range(p)[::-1]]": "there are 8 chunks, but your list has 4",
            "answer = lambda p: [0] * 4 * p": "not four each",
            "answer = lambda p: p": "is not a list of devices",
            "answer = [0, 1, 1, 0] * 2": "is not a function",
        },
    },
    "17-4": {
        "right": [
            "def answer(costs, room):\n"
            "    best = None\n"
            "    for name in ('zb_v', 'zb'):\n"
            "        table, own = make_for(name, 4, 8, costs, memory=room)\n"
            "        time = pl.simulate(table, own).makespan\n"
            "        best = min(best or (time, name), (time, name))\n"
            "    return make_for(best[1], 4, 8, costs, memory=room)[0]",
        ],
        "wrong": {
            "answer = lambda costs, room: make_for('zb_v', 4, 8, costs, memory=room)[0]": "49",
            "answer = lambda costs, room: make_for('zb', 4, 8, costs, memory=room)[0]": "takes 32",
            "answer = lambda costs, room: pl.make('zb_v', 4, 8)": "holds 4",
            "answer = lambda costs, room: make_for('zb' if costs.transfer else 'zb_v', 4, 8, costs, memory=room)[0]": "transfers of 0.1",
            "answer = lambda costs, room: make_for('zb', 4, 8, costs, memory=room)": "not a table",
            "answer = lambda costs, room: pl.make('v_min', 2, 8)": "2 devices",
        },
    },
    "17-3": {
        "right": ["answer = 48 / 34", "answer = 1.41"],
        "wrong": {
            "answer = 24 / 18": "for four devices",
            "answer = 34 / 48": "the V over the loop",
            "answer = 32 / 34": "two chunks of a loop",
            "answer = 2": "Which two chunks",
        },
    },
}
