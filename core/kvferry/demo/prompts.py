"""What the demo asks when nobody says what."""

_PASSAGE = (
    "The Severn Bridge carries a motorway between England and Wales. Before it was opened in 1966, drivers took a "
    "small car ferry at Aust, which could not sail at low tide, in strong wind or in fog; the way by Gloucester was "
    "more than fifty miles long. The ferry was a simple boat: cars drove on over the side, turned on a wooden platform "
    "in the middle of the deck, and drove off over the same side after the crossing. On its last day the queue was so "
    "long that the crew sailed until late in the evening. The next morning the Queen opened the bridge, and the three "
    "boats were sold. One of them, the Severn Princess, was found years later in Ireland, and brought home."
)

DEFAULT_PROMPTS = (
    "The capital of France is",
    f"{_PASSAGE} The drivers who waited for the ferry",
    f"{_PASSAGE} Today the bridge",
)
"""The third shares a long prefix with the second, whose blocks do not travel again."""
