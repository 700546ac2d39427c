// What the shared object exports.
#include "agent.hpp"

namespace {

const char *library() {
    static const std::string name = [] {
        unsigned major = 0, minor = 0, patch = 0;
        ucp_get_version(&major, &minor, &patch);
        return "ucx " + std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
    }();
    return name.c_str();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const kvferry_transport *kvferry_transport_v1(void) {
    static const kvferry_transport table = kvferry::Adapter<kvferry::ucx::UcxAgent>::table("ucx", library);
    return &table;
}
