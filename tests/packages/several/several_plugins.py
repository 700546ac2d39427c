from kvferry_plugins.testing import FakeModelPlugin

first = FakeModelPlugin("FirstForCausalLM", runtime="PYTHON")
second = FakeModelPlugin("SecondForCausalLM", runtime="CPP")
