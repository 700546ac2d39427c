import ctypes

library = ctypes.CDLL("libkvferry_no_such_library.so.1")
