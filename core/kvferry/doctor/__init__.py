"""``kvferry doctor``: what stands in the way of a hand-off here, why, and what to do about it."""
