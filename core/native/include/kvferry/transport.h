/* The C ABI between kvferry's native core and one transport.
 *
 * A transport is a shared object that exports `kvferry_transport_v1`. The core loads it by path, on choice, and calls
 * an agent from one thread at a time: the thread that created it. Nothing here may block, but for `create`,
 * `connect`, `disconnect` and `close`, which may take the time of their system calls.
 *
 * Rules:
 *  - C types only; no exception may leave a function.
 *  - A function that does not return KVFERRY_OK has changed nothing, and says why in `error` where it has one.
 *  - Strings are UTF-8 and end with a zero byte.
 *  - Version 1 stays as it is. What comes later is appended to the table, and `size` says what is there.
 */
#ifndef KVFERRY_TRANSPORT_H
#define KVFERRY_TRANSPORT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KVFERRY_TRANSPORT_ABI 1u
#define KVFERRY_ERROR_BYTES 512
#define KVFERRY_POLLS_POLITELY (-2)

typedef enum kvferry_status {
    KVFERRY_OK = 0,
    /* Not now; ask again after `progress`. */
    KVFERRY_AGAIN = 1,
    /* The caller's argument is wrong. */
    KVFERRY_INVALID = 2,
    /* The transport cannot work on this machine, or in this configuration. */
    KVFERRY_UNAVAILABLE = 3,
    /* The peer is gone, or its connection broke. */
    KVFERRY_UNREACHABLE = 4,
    KVFERRY_NO_MEMORY = 5,
    /* Taken back by `disconnect` or `close`. */
    KVFERRY_CANCELLED = 6,
    KVFERRY_INTERNAL = 7
} kvferry_status;

typedef enum kvferry_device_kind { KVFERRY_CPU = 0, KVFERRY_CUDA = 1 } kvferry_device_kind;

typedef struct kvferry_error {
    char text[KVFERRY_ERROR_BYTES];
} kvferry_error;

typedef struct kvferry_agent kvferry_agent;

typedef struct kvferry_option {
    const char *key;
    const char *value;
} kvferry_option;

typedef struct kvferry_region {
    uint64_t address;
    uint64_t nbytes;
    int32_t device_kind;
    int32_t device;
} kvferry_region;

/* `nbytes` from our `src` to the peer's `dst`; never 0. Both ends lie within one registered region each. */
typedef struct kvferry_segment {
    uint64_t src;
    uint64_t dst;
    uint64_t nbytes;
} kvferry_segment;

/* The end of one post. KVFERRY_OK only once the bytes are in the target's memory, visible to its threads. */
typedef struct kvferry_completion {
    uint64_t post;
    int32_t status;
    kvferry_error error;
} kvferry_completion;

typedef struct kvferry_transport {
    uint32_t abi;
    /* sizeof(kvferry_transport) as the transport was compiled. */
    uint32_t size;
    /* Lower case: "ucx". */
    const char *name;
    /* The library behind it, and the version that is loaded: "ucx 1.22.0". Workers compare it. */
    const char *(*library)(void);

    /* An option that the transport does not know is KVFERRY_INVALID. */
    kvferry_status (*create)(const kvferry_option *options, size_t count, kvferry_agent **agent, kvferry_error *error);
    /* End everything and free the agent. What was posted and is not complete may be lost; it never lands later. */
    void (*close)(kvferry_agent *agent);

    kvferry_status (*register_memory)(kvferry_agent *agent, const kvferry_region *region, uint64_t *registration,
                                      kvferry_error *error);
    kvferry_status (*deregister_memory)(kvferry_agent *agent, uint64_t registration, kvferry_error *error);

    /* What a peer's `connect` needs. Writes at most `capacity` bytes and always the full length to `nbytes`;
     * KVFERRY_NO_MEMORY if they do not fit. Covers what is registered by now. */
    kvferry_status (*describe)(kvferry_agent *agent, uint8_t *buffer, size_t capacity, size_t *nbytes,
                               kvferry_error *error);
    /* `descriptor` is not trusted to be well formed. */
    kvferry_status (*connect)(kvferry_agent *agent, const uint8_t *descriptor, size_t nbytes, uint64_t *peer,
                              kvferry_error *error);
    /* Forget a peer; one that is not known is none of our business. Its posts run to their end, which is reported by
     * `progress` as ever: a write that has started cannot be taken back. `dead`: its process is proven gone, so that
     * nothing can land there; end its posts at once. */
    void (*disconnect)(kvferry_agent *agent, uint64_t peer, int dead);

    /* Start `count` one-sided writes. They end as one completion that carries `post`, the caller's name for them.
     * The segments are read before this returns. A failure that comes after the first write has started is a failed
     * completion, not a failed call. */
    kvferry_status (*post)(kvferry_agent *agent, uint64_t peer, uint64_t post, const kvferry_segment *segments,
                           size_t count, kvferry_error *error);
    /* Make progress, as writer and as target; returns how many completions were written. */
    size_t (*progress)(kvferry_agent *agent, kvferry_completion *completions, size_t capacity);

    /* A descriptor that turns readable when `progress` has work, or -1: then the agent is polled while it is busy.
     * KVFERRY_POLLS_POLITELY is -1 of a transport whose `progress` itself naps while nothing moves. */
    int (*wakeup_fd)(kvferry_agent *agent);
    /* To be called before sleeping on `wakeup_fd`. KVFERRY_AGAIN: there is work, do not sleep. */
    kvferry_status (*arm)(kvferry_agent *agent);

    /* Optional, both or none (NULL). A short message to the peer's agent, in order with nothing else. It says what a
     * writer's process would say itself if it did not have to wait for its interpreter: "all is complete". */
    kvferry_status (*notify)(kvferry_agent *agent, uint64_t peer, const uint8_t *message, size_t nbytes,
                             kvferry_error *error);
    /* The oldest message that came, if any: KVFERRY_AGAIN = none, KVFERRY_NO_MEMORY = `nbytes` says how much it needs. */
    kvferry_status (*take_notice)(kvferry_agent *agent, uint8_t *buffer, size_t capacity, size_t *nbytes);
} kvferry_transport;

/* The one exported symbol. The table lives as long as the library. */
const kvferry_transport *kvferry_transport_v1(void);

#ifdef __cplusplus
}
#endif
#endif
