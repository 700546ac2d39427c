// Which CUDA context is current on a lane's thread, with a driver that only keeps account.
#include "core/cuda_context.hpp"

#include <dlfcn.h>

#include "check.hpp"
#include "core/engine.hpp"

using namespace kvferry;

namespace {

int (*current)() = nullptr;

void without_a_driver_there_is_none() {
    adopt_cuda_context();
    CHECK(message_of<Error>([] { adopt_cuda_context(0); }).starts_with("this process does not use the CUDA device 0"));
}

void a_thread_adopts_the_context_of_the_device_in_use() {
    std::thread([] {
        CHECK(current() == -1);
        adopt_cuda_context();
        CHECK(current() == 1);
    }).join();
    CHECK(current() == -1);
}

void a_device_that_the_process_does_not_use_is_refused() {
    for (const int device : {0, 2}) CHECK(!message_of<Error>([=] { adopt_cuda_context(device); }).empty());
    adopt_cuda_context(1);
    CHECK(current() == 1);
}

void device_memory_is_registered_where_its_context_is_current() {
    Engine engine(TransportLibrary(kvferry_transport_v1()), {});
    std::uint8_t memory[64];
    const auto address = reinterpret_cast<std::uint64_t>(memory);
    CHECK(message_of<Error>([&] {
        engine.register_memory({{address, sizeof memory, KVFERRY_CUDA, 0}});
    }).ends_with("whose memory is it?"));
    engine.register_memory({{address, sizeof memory, KVFERRY_CUDA, 1}});
}

}  // namespace

int main(int, char **arguments) {
    without_a_driver_there_is_none();
    void *driver = ::dlopen(arguments[1], RTLD_NOW);
    CHECK(driver != nullptr);
    current = reinterpret_cast<int (*)()>(::dlsym(driver, "fake_current"));
    a_thread_adopts_the_context_of_the_device_in_use();
    a_device_that_the_process_does_not_use_is_refused();
    device_memory_is_registered_where_its_context_is_current();
    CHECK(reinterpret_cast<int (*)()>(::dlsym(driver, "fake_retained"))() == 0);
    std::puts("cuda context: all fine");
}
