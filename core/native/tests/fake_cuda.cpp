// A CUDA driver with two devices, of which the process uses the second; contexts are current by thread, as in CUDA's.
namespace {

constexpr int kUsed = 1;
int contexts[2];
thread_local void *current = nullptr;
int retained = 0;

}  // namespace

extern "C" {

int cuDeviceGetCount(int *count) {
    *count = 2;
    return 0;
}

int cuDeviceGet(int *device, int ordinal) {
    *device = ordinal;
    return ordinal < 2 ? 0 : 101;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = device == kUsed;
    return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &contexts[device];
    ++retained;
    return 0;
}

int cuDevicePrimaryCtxRelease_v2(int) {
    --retained;
    return 0;
}

int cuCtxSetCurrent(void *context) {
    current = context;
    return 0;
}

// For the test: the device whose context is current on this thread (-1 = none), and contexts that nobody gave back.
int fake_current() { return current == nullptr ? -1 : static_cast<int>(static_cast<int *>(current) - contexts); }
int fake_retained() { return retained; }
}
