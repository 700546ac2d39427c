// The part of NIXL's C interface that we call, found in the library that the wheel brings. There is no header of it in
// the wheel: the names and types are those of NIXL 1.x, and what is missing is said when it is looked up.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "../../core/error.hpp"

namespace kvferry::nixl {

constexpr int kSuccess = 0;
constexpr int kInProgress = 1;
constexpr unsigned kWrite = 1;

using Handle = void *;

class Api {
public:
    static const Api &get() {
        static const Api api;
        return api;
    }

    int (*create_agent)(const char *name, const void *config, Handle *agent);
    int (*destroy_agent)(Handle agent);
    int (*plugin_params)(Handle agent, const char *plugin, Handle *memories, Handle *params);
    int (*create_backend)(Handle agent, const char *plugin, Handle params, Handle *backend);
    int (*create_options)(Handle *options);
    int (*add_backend)(Handle options, Handle backend);
    int (*local_metadata)(Handle agent, void **data, std::size_t *nbytes);
    int (*load_metadata)(Handle agent, const void *data, std::size_t nbytes, char **name);
    int (*forget_metadata)(Handle agent, const char *name);
    int (*create_memory)(unsigned kind, Handle *list);
    int (*destroy_memory)(Handle list);
    int (*add_memory)(Handle list, std::uintptr_t address, std::size_t nbytes, std::uint64_t device, const void *, std::size_t);
    int (*register_memory)(Handle agent, Handle list, Handle options);
    int (*deregister_memory)(Handle agent, Handle list, Handle options);
    int (*create_list)(unsigned kind, Handle *list);
    int (*destroy_list)(Handle list);
    int (*add_to_list)(Handle list, std::uintptr_t address, std::size_t nbytes, std::uint64_t device);
    int (*create_request)(Handle agent, unsigned operation, Handle here, Handle there, const char *name, Handle *request, Handle options);
    int (*post)(Handle agent, Handle request, Handle options);
    int (*status)(Handle agent, Handle request);
    int (*release)(Handle agent, Handle request);
    int (*destroy_request)(Handle request);
    int (*send_notice)(Handle agent, const char *name, const void *data, std::size_t nbytes, Handle options);
    int (*create_notices)(Handle *notices);
    int (*destroy_notices)(Handle notices);
    int (*receive_notices)(Handle agent, Handle notices, Handle options);
    int (*senders)(Handle notices, std::size_t *count);
    int (*sender)(Handle notices, std::size_t index, const char **name);
    int (*count_of)(Handle notices, const char *name, std::size_t *count);
    int (*notice)(Handle notices, const char *name, std::size_t index, const void **data, std::size_t *nbytes);

private:
    Api() {
        // Loaded by path before us; it is found by its name then.
        library_ = ::dlopen("libnixl_capi.so", RTLD_NOW | RTLD_LOCAL);
        if (library_ == nullptr) throw Error(KVFERRY_UNAVAILABLE, std::string("libnixl_capi.so: ") + ::dlerror());
        bool (*is_stub)() = nullptr;
        find(is_stub, "is_stub");
        if (is_stub()) throw Error(KVFERRY_UNAVAILABLE, "this libnixl_capi.so is a stub");
        find(create_agent, "create_configured_agent");
        find(destroy_agent, "destroy_agent");
        find(plugin_params, "get_plugin_params");
        find(create_backend, "create_backend");
        find(create_options, "create_opt_args");
        find(add_backend, "opt_args_add_backend");
        find(local_metadata, "get_local_md");
        find(load_metadata, "load_remote_md");
        find(forget_metadata, "invalidate_remote_md");
        find(create_memory, "create_reg_dlist");
        find(destroy_memory, "destroy_reg_dlist");
        find(add_memory, "reg_dlist_add_desc");
        find(register_memory, "register_mem");
        find(deregister_memory, "deregister_mem");
        find(create_list, "create_xfer_dlist");
        find(destroy_list, "destroy_xfer_dlist");
        find(add_to_list, "xfer_dlist_add_desc");
        find(create_request, "create_xfer_req");
        find(post, "post_xfer_req");
        find(status, "get_xfer_status");
        find(release, "release_xfer_req");
        find(destroy_request, "destroy_xfer_req");
        find(send_notice, "gen_notif");
        find(create_notices, "create_notif_map");
        find(destroy_notices, "destroy_notif_map");
        find(receive_notices, "get_notifs");
        find(senders, "notif_map_size");
        find(sender, "notif_map_get_agent_at");
        find(count_of, "notif_map_get_notifs_size");
        find(notice, "notif_map_get_notif");
    }

    template <typename Function>
    void find(Function &function, const char *name) {
        const std::string symbol = std::string("nixl_capi_") + name;
        function = reinterpret_cast<Function>(::dlsym(library_, symbol.c_str()));
        if (function == nullptr) throw Error(KVFERRY_UNAVAILABLE, "this NIXL has no " + symbol);
    }

    void *library_;
};

inline void require(int status, const std::string &what) {
    if (status != kSuccess) throw Error(KVFERRY_INTERNAL, what + " (NIXL's status " + std::to_string(status) + ")");
}

}  // namespace kvferry::nixl
