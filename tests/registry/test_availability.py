from kvferry.registry.availability import missing_modules


def test_a_module_is_looked_up_by_its_top_level_and_a_wheel_without_one_by_its_name():
    wanted = ("numpy.linalg", "no_such_module", "distribution:numpy", "distribution:no-such-wheel")
    assert missing_modules(wanted) == ("no_such_module", "no-such-wheel")
