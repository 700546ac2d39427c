from kvferry_plugins import hookimpl


@hookimpl
def preferred_transceiver_runtime(architecture):
    return "PYTHON" if architecture == "AcmeForCausalLM" else None
