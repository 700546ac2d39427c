import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.integrations.transformers.sampling import GREEDY, SamplingParams, sample, uniform

LOGITS = torch.tensor([0.1, 2.0, -1.0, 1.0, 0.0]).log_softmax(-1)


def test_greedy_takes_the_likeliest_and_the_first_of_equals():
    assert sample(LOGITS, GREEDY, 0) == 1
    assert sample(torch.tensor([0.0, 3.0, 3.0]), GREEDY, 7) == 1


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32))
def test_a_seed_and_a_counter_give_one_token(seed, counter):
    params = SamplingParams(temperature=1.0, seed=seed)
    assert 0.0 <= uniform(seed, counter) < 1.0
    assert sample(LOGITS, params, counter) == sample(LOGITS.clone(), params, counter)


def test_counters_and_seeds_give_different_numbers():
    numbers = {uniform(seed, counter) for seed in range(30) for counter in range(30)}
    assert len(numbers) == 900


def test_the_number_of_a_seed_and_counter_is_the_same_on_every_machine():
    assert uniform(42, 7) == 0.8614033402518924


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature):
    params = SamplingParams(temperature=temperature, seed=1)
    count = 20_000
    seen = Counter(sample(LOGITS, params, counter) for counter in range(count))
    for token, probability in enumerate((LOGITS.double() / temperature).softmax(-1).tolist()):
        assert abs(seen[token] / count - probability) < 4 * math.sqrt(probability / count) + 1e-3


def test_top_p_leaves_the_smallest_set_that_is_likely_enough():
    probabilities = torch.tensor([0.15, 0.5, 0.05, 0.3])
    for top_p, allowed in ((0.4, {1}), (0.5, {1}), (0.6, {1, 3}), (0.94, {0, 1, 3}), (1.0, {0, 1, 2, 3})):
        params = SamplingParams(temperature=1.0, top_p=top_p, seed=5)
        assert {sample(probabilities.log(), params, counter) for counter in range(500)} == allowed


def test_a_low_temperature_is_as_good_as_greedy():
    params = SamplingParams(temperature=1e-6, seed=3)
    assert {sample(LOGITS, params, counter) for counter in range(200)} == {1}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": 2**63}, "seed"),
    ],
)
def test_parameters_out_of_range_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**fields)
