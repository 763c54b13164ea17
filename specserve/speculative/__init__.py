"""The algorithm of speculative decoding, on arrays alone: it reads no file and knows no request.

Read `tree` (what is proposed), `drafter` (the interface of a proposer), `sampling` (the target's own draw at each node)
and `verify` (how far the draft agrees), then `slot_state` (the arrays of all sequences) and `step`, which joins them,
and `repeat`, which makes several steps in one call. `acceptance` counts what was accepted, and `intervals` gives the
certainty of such figures. `controller`, with `costs` and `confidence`, chooses the next step's tree on the host.
"""
