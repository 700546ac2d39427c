// A test runner of one page: a failed check ends the program, naming its line.
#pragma once

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

#define CHECK(condition)                                                                  \
    do {                                                                                  \
        if (!(condition)) {                                                               \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition);  \
            std::abort();                                                                 \
        }                                                                                 \
    } while (false)

template <typename Condition>
bool eventually(Condition condition, std::chrono::milliseconds longest = std::chrono::seconds(20)) {
    const auto end = std::chrono::steady_clock::now() + longest;
    while (!condition()) {
        if (std::chrono::steady_clock::now() > end) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
}

template <typename Error, typename Action>
std::string message_of(Action action) {
    try {
        action();
    } catch (const Error &error) {
        return error.what();
    }
    return {};
}
