from kvferry_plugins import hookimpl


class Plugin:
    @hookimpl
    def model_defaults(self, architecture):
        return None
