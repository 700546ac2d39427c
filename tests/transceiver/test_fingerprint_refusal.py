from kvferry.transceiver.fingerprint import Difference, Severity, refusal, refused_by


def test_both_sides_of_a_refusal_read_their_own_value_first():
    found = [Difference("dtype", "bfloat16", "float32", Severity.FATAL)]
    ours = refusal(found, "tcp://127.0.0.1:1")
    assert ours is not None
    theirs = refused_by("tcp://127.0.0.1:2", str(ours), {"dtype": ("float32", "bfloat16")})
    assert "'bfloat16' here, 'float32' there" in str(ours)
    assert "'float32' here, 'bfloat16' there" in str(theirs)
    assert "kv_cache_config.dtype" in str(theirs)
    assert theirs.fields == {"dtype": ("float32", "bfloat16")}


def test_a_refusal_without_fields_gives_its_reason():
    assert str(refused_by("tcp://127.0.0.1:2", "malformed message", {})).endswith("malformed message")


def test_what_only_warns_refuses_nobody():
    assert refusal([Difference("libraries", {}, {"nixl": "2"}, Severity.WARNING)], "peer") is None
