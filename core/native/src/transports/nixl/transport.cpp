// What the shared object exports.
#include "agent.hpp"

namespace {

// The C interface does not tell its version; whoever loads the library knows, and tells by the environment.
const char *library() {
    static const std::string name = [] {
        const char *version = std::getenv("KVFERRY_NIXL_VERSION");
        return std::string("nixl ") + (version != nullptr ? version : "unknown");
    }();
    return name.c_str();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const kvferry_transport *kvferry_transport_v1(void) {
    static const kvferry_transport table = kvferry::Adapter<kvferry::nixl::NixlAgent>::table("nixl", library);
    return &table;
}
