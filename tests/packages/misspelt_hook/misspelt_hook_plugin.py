from kvferry_plugins import hookimpl


@hookimpl
def model_defaults(architecture):
    return None


@hookimpl
def prefered_transceiver_runtime(architecture):
    return "PYTHON"
