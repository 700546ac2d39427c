from kvferry_plugins import hookimpl


@hookimpl
def model_defaults(architecture, pretrained_confg):
    return None
