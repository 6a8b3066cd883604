"""Tables made by hand: the editor's board, and the puzzle behind it.

puzzle/   drafts, why a move cannot be made, a coach, levels: plain Python, in a browser too
board     the data that the picture is drawn from
try_out   the table on worker threads, and its verdict
editor    the widget
"""
