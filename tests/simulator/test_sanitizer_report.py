"""Reports of sanitizers, as the simulator prints them."""

from __future__ import annotations

from graphar.simulator.sanitizer_report import shortened

REGIONS = {"rank 0's scratch": (0x7F0000001000, 4096), "rank 1's input": (0x7F0000010000, 100)}
RACE = """==================
WARNING: ThreadSanitizer: data race (pid=31946)
  Read of size 8 at 0x7f0000001080 by thread T3:
    #0 unsigned long long load_as<unsigned long long>(void*) device/ptx/ptx.cuh:57 (7615d666f5e7+0xd6f1d)
    #1 void one_shot<bf16, 2, 3>(Arguments) allreduce/one_shot.cu:43 (7615d666f5e7+0xdb08f)
    #2 operator() /home/me/.cache/graphar/simulator/tmpzad346js/run.cpp:282 (7615d666f5e7+0xce8e4)
    #3 std::function<void ()>::operator()() const /usr/include/c++/12/bits/std_function.h:591 (7615d666f5e7+0xd0911)
    #4 simulator::(anonymous namespace)::enter_fiber() <null> (7615d666f5e7+0xc1d0e)

  Previous write of size 4 at 0x7f0000001080 by thread T9:
    #0 void one_shot<bf16, 2, 3>(Arguments) allreduce/one_shot.cu:39 (7615d666f5e7+0xda74c)

  Thread T3 'rank 0, block 0, thread 3' (tid=0, running) created by main thread at:
    #0 simulator::make_views() <null> (7615d666f5e7+0xcda89)

  Thread T9 'rank 1, block 0, thread 2' (tid=0, running) created by main thread at:
    #0 simulator::make_views() <null> (7615d666f5e7+0xcda89)

SUMMARY: ThreadSanitizer: data race device/ptx/ptx.cuh:57 in load_as
==================
"""
BEYOND = """AddressSanitizer:DEADLYSIGNAL
=================================================================
==2088==ERROR: AddressSanitizer: SEGV on unknown address 0x7f0000010084 (pc 0x5627e84 bp 0x7f0000010084 sp 0x7f8b T0)
    #0 0x5627e849758e in load_word ptx.cuh:264
    #1 0x5627e8487867 in main /home/me/run.cpp:425
==2088==ABORTING
"""


def test_a_race_is_told_with_the_ranks_threads_and_memory_and_the_kernels_frames():
    assert (
        shortened(RACE, REGIONS)
        == """WARNING: ThreadSanitizer: data race
  Read of size 8 at rank 0's scratch, byte 128 by rank 0, block 0, thread 3:
    #0 unsigned long long load_as<unsigned long long>(void*) device/ptx/ptx.cuh:57
    #1 void one_shot<bf16, 2, 3>(Arguments) allreduce/one_shot.cu:43

  Previous write of size 4 at rank 0's scratch, byte 128 by rank 1, block 0, thread 2:
    #0 void one_shot<bf16, 2, 3>(Arguments) allreduce/one_shot.cu:39

SUMMARY: ThreadSanitizer: data race device/ptx/ptx.cuh:57 in load_as"""
    )


def test_an_access_out_of_bounds_is_told_by_the_memory_that_it_is_nearest_to():
    assert (
        shortened(BEYOND, REGIONS)
        == """AddressSanitizer:DEADLYSIGNAL
ERROR: AddressSanitizer: SEGV on unknown address rank 1's input, byte 132 of 100, out of bounds
    #0 load_word ptx.cuh:264
ABORTING"""
    )


def test_addresses_of_nobodys_memory_stay_numbers():
    assert shortened("at 0x5f0000001000", REGIONS) == "at 0x5f0000001000"
    assert shortened("at 0x5f0000001000", {}) == "at 0x5f0000001000"
