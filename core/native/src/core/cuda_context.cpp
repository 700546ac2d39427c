#include "cuda_context.hpp"

#include <dlfcn.h>

#include <optional>
#include <string>

#include "error.hpp"

namespace kvferry {

namespace {

// The part of the CUDA driver that is called here, with its types as the ABI has them.
class Driver {
public:
    static std::optional<Driver> loaded() {
        // Who allocated device memory has loaded it; where nobody has, there is no context to adopt.
        void *library = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        if (library == nullptr) return std::nullopt;
        Driver driver;
        const bool complete = find(library, "cuDeviceGetCount", driver.count_) &&
                              find(library, "cuDeviceGet", driver.get_) &&
                              find(library, "cuDevicePrimaryCtxGetState", driver.state_) &&
                              find(library, "cuDevicePrimaryCtxRetain", driver.retain_) &&
                              find(library, "cuDevicePrimaryCtxRelease_v2", driver.release_) &&
                              find(library, "cuCtxSetCurrent", driver.set_current_);
        if (!complete) return std::nullopt;
        return driver;
    }

    int devices() const {
        int count = 0;
        return count_(&count) == 0 ? count : 0;
    }

    // False if the process does not use the device.
    bool adopt(int ordinal) const {
        int device = 0, active = 0;
        unsigned flags = 0;
        if (get_(&device, ordinal) != 0 || state_(device, &flags, &active) != 0 || active == 0) return false;
        void *context = nullptr;
        if (retain_(&context, device) != 0) return false;
        const bool current = set_current_(context) == 0;
        release_(device);  // whoever made it active keeps it
        return current;
    }

private:
    template <typename Function>
    static bool find(void *library, const char *name, Function *&function) {
        function = reinterpret_cast<Function *>(::dlsym(library, name));
        return function != nullptr;
    }

    int (*count_)(int *count);
    int (*get_)(int *device, int ordinal);
    int (*state_)(int device, unsigned *flags, int *active);
    int (*retain_)(void **context, int device);
    int (*release_)(int device);
    int (*set_current_)(void *context);
};

}  // namespace

void adopt_cuda_context() {
    const auto driver = Driver::loaded();
    if (!driver) return;
    for (int device = 0; device < driver->devices(); ++device) {
        if (driver->adopt(device)) return;
    }
}

void adopt_cuda_context(int device) {
    const auto driver = Driver::loaded();
    if (!driver || !driver->adopt(device)) {
        throw Error(KVFERRY_UNAVAILABLE, "this process does not use the CUDA device " + std::to_string(device) +
                                             ": whose memory is it?");
    }
}

}  // namespace kvferry
