"""Answers to the exercises of lecture 0: right ones, and wrong ones with a part of their hint."""

ANSWERS = {
    "00-1": {
        "right": ["answer = 5.0", "answer = 8 - 3"],
        "wrong": {
            "answer = 8": "how many there are in all",
            "answer = 4": "after a backward",
            "answer = 3": "holds both stages",
            "answer = 2": "stage 2 alone",
            "answer = 6": "how many B, from the start",
        },
    },
    "00-2": {
        "right": [
            'answer = pl.make("inter_layer", 3, 1).grid()',
            'answer = "0F0 . . . . 0B0 0U0\\n. 1F0 . . 1B0 1U0\\n. . 2F0 2B0 2U0"',
        ],
        "wrong": {
            'answer = "0F0 1F0 2F0 2B0 1B0 0B0"': "1 devices, 3 stages, 1 micro-batches",
            'answer = "0F0 0B0\\n1B0 1F0\\n2F0 2B0"': "it needs 1F0 first",
            'answer = "0F0 0B0\\n1F0\\n2F0 2B0 1B0"': "stage 1 has actions in rows 1 and 2",
            'answer = "0F0 0B0\\n1F0 1B0\\n2F0"': "2B0 is missing on device 2",
            'answer = "0F0 0B0\\n1F0 1B0"': "asks for 3 devices, 3 stages, 1 micro-batches",
            'answer = "0F0\\n1F0\\n2F0"': "there is no backward",
            'answer = "F0 B0"': "is not an action",
            'answer = ["0F0 0B0", "1F0 1B0", "2F0 2B0"]': "one line for each device",
        },
    },
    "00-3": {
        "right": [
            'answer = "0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1"',
            'answer = "0F0 0F1 0B1 0B0\\n1F0 1F1 1B1 1B0"',
        ],
        "wrong": {
            'answer = "0F0 0F1 0B0 0B1\\n1F0 1B0 1F0 1B1"': "1F0 appears twice on device 1",
            'answer = "0F0 0F1 0B0 0B1\\n1F0 1B0 1B1"': "1F1 is missing on device 1",
            'answer = "0F0 0B0\\n1F0 1B0"': "asks for 2 devices, 2 stages, 2 micro-batches",
            'answer = "0F0 0F1 0B0 0B1\\n1F0 1B1 1F1 1B0"': "it needs 1F1 first",
        },
    },
    "00-4": {
        "right": ['answer = "pipedream_2bw"', 'answer = "pipedream_" + "2bw"'],
        "wrong": {
            'answer = "pipedream"': "an update follows every backward",
            'answer = "pipedream_flush"': "here 0F3 is",
            'answer = "gpipe"': "here 0B0 is before 0F3",
            'answer = "inter_layer"': "here 0F1 follows 0F0",
            'answer = "interleaved"': "device 0 has stage 0 alone",
            'answer = "2BW"': "choose from",
        },
    },
}
