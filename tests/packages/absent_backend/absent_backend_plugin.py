from kvferry_plugins import hookimpl
from kvferry_plugins.types import RuntimeSupport, TransferBackend


@hookimpl
def transfer_backends():
    return [
        TransferBackend(
            "ABSENT",
            {"PYTHON": RuntimeSupport()},
            probe="absent_backend_plugin:probe",
            requires=("kvferry_no_such_module",),
            install="pip install kvferry-no-such-module",
        )
    ]
