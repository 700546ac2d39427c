"""The suite for a transceiver: two of them hand prompts over, with scripted agents under them."""

from kvferry_plugins.testing.conformance.transceiver_end_checks import EndChecks
from kvferry_plugins.testing.conformance.transceiver_fault_checks import FaultChecks
from kvferry_plugins.testing.conformance.transceiver_hand_off_checks import HandOffChecks


class TransceiverConformance(HandOffChecks, FaultChecks, EndChecks):
    """Subclass it as ``Test…``, say what your plugin declares, and how a transceiver is made.

    ::

        class TestAcmeTransceiver(TransceiverConformance):
            runtime = acme.transceiver_runtimes()[0]

            def make_transceiver(self, spec):
                return acme.create_transceiver(spec)

    What it cannot do it declares, by ``runtime`` and by its ``capabilities``; the suite tests that they agree, that it
    does what they say, and that it refuses what they do not.
    """
