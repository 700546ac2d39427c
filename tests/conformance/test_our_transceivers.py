"""Both of our runtimes run the suite that we hand to others, over scripted agents; CPP over its own engine, too."""

from transceiver.native import make_native_agent

from kvferry.transceiver import plugin_cpp, plugin_python
from kvferry_plugins.testing.conformance import TransceiverConformance
from kvferry_plugins.testing.conformance.transceiver_end_checks import EndChecks
from kvferry_plugins.testing.conformance.transceiver_hand_off_checks import HandOffChecks


class TestPython(TransceiverConformance):
    runtime = plugin_python.transceiver_runtimes()[0]

    def make_transceiver(self, spec):
        return plugin_python.create_transceiver(spec)


class TestCpp(TransceiverConformance):
    runtime = plugin_cpp.transceiver_runtimes()[0]

    def make_transceiver(self, spec):
        return plugin_cpp.create_transceiver(spec)


class TestCppWithItsEngine(HandOffChecks, EndChecks):
    runtime = TestCpp.runtime
    make_transceiver = TestCpp.make_transceiver

    def make_agent(self, spec, script, hub):
        return make_native_agent(spec)
