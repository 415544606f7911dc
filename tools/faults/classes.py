"""The classes of faults, and the tests that cover them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FaultClass:
    """A class of faults. tests: "file::function" under tests/. note: what is not covered, and why."""

    what: str
    tests: tuple[str, ...] = ()
    note: str = ""


_ENGINE = "faults/test_engine_faults.py"
_LINKS = "faults/test_links.py"
_AROUND = "faults/test_surroundings.py"

CLASSES: Mapping[str, FaultClass] = {
    "F1": FaultClass(
        "a runner dies during a request",
        ("faults/test_drawn.py::test_a_request_survives",
         "node/test_faults.py::test_a_request_survives_the_death_of_any_runner_with_the_same_text",
         "rings/placing/test_recovery.py::test_a_killed_runner_is_started_again_in_its_place_and_the_others_keep_theirs",
         "meshes/test_recovery.py::test_of_a_large_model_only_the_lost_share_is_read_again",
         "rings/runner/test_change_of_plan.py::test_every_text_is_right_whichever_stage_is_lost_and_when"),
    ),
    "F2": FaultClass(
        "an engine hangs while it decodes",
        (f"{_ENGINE}::test_an_engine_that_hangs_in_a_forward_is_ended_and_the_answer_goes_on",
         f"{_ENGINE}::test_a_healthy_prefill_that_takes_long_is_never_ended",
         "rings/serving/test_redial.py::test_a_driver_that_stands_still_is_not_waited_for",
         "rings/hosting/test_stalls.py::test_an_engine_that_hangs_in_a_frame_is_replaced_and_the_answer_goes_on",
         "rings/hosting/test_stalls.py::test_an_engine_that_is_slow_is_left_alone"),
    ),
    "F3": FaultClass(
        "an engine hangs while it loads",
        (f"{_ENGINE}::test_an_engine_that_hangs_while_it_loads_is_given_up_and_others_serve",
         "rings/hosting/test_guard.py::test_a_wedge_is_never_tried_again_here_not_even_after_a_restart"),
    ),
    "F4": FaultClass(
        "a ring is never completed",
        (f"{_LINKS}::test_a_member_that_falls_silent_while_it_is_placed_on_holds_up_no_request",
         "rings/hosting/test_hops.py::test_a_hop_whose_address_dies_goes_on_at_another_one_of_the_same_peer",
         "rings/placing/test_placing.py::test_a_node_stops_within_seconds_even_while_loading"),
    ),
    "F5": FaultClass(
        "a rank of a tensor group is lost",
        ("faults/test_group_losses.py::test_a_rank_is_lost",
         "faults/test_group_losses.py::test_a_rank_never_comes",
         "meshes/test_tensor_group_rings.py::test_without_a_rank_the_leader_ends_with_its_name",
         "meshes/test_tensor_group_rings.py::test_without_its_leader_a_rank_ends_by_itself",
         "meshes/test_tensor_group_rings.py::test_a_rank_that_never_comes_is_a_failure_with_a_name"),
    ),
    "F6": FaultClass(
        "a runner freezes before its first report, idle, or at work",
        (f"{_ENGINE}::test_a_runner_that_freezes_before_its_first_report_holds_up_nobody_else",
         "node/test_faults.py::test_a_frozen_runner_is_killed_after_its_silence",
         "faults/test_drawn.py::test_a_request_survives"),
    ),
    "F7": FaultClass(
        "a node dies, is suspended, or cannot be reached",
        ("faults/test_drawn.py::test_a_request_survives",
         f"{_LINKS}::test_connections_of_which_one_end_has_forgotten_are_dialled_again",
         f"{_LINKS}::test_a_node_that_stands_still_for_ten_seconds_costs_no_token",
         f"{_AROUND}::test_a_cable_that_is_pulled_costs_an_answer_nothing_but_time",
         "meshes/test_recovery.py::test_a_node_stopped_for_ten_seconds_costs_no_token_and_nothing_is_planned_anew",
         "meshes/test_continuation.py::test_the_answer_of_a_killed_entry_peer_goes_on_at_another",
         "faults/test_entry_peer.py::test_requests_without_a_key_end_on_all_members",
         "node/test_out_of_reach.py::test_a_ring_whose_driver_does_not_answer_here_is_not_waited_for",
         "rings/placing/test_silent_machines.py::"
         "test_a_ring_goes_on_at_once_when_the_mesh_agrees_that_a_frozen_machine_is_dead",
         "rings/placing/test_silent_machines.py::"
         "test_an_idle_ring_whose_owner_stands_still_is_taken_over_though_a_runner_of_the_owner_lives",
         "rings/serving/test_busy_drivers.py::test_an_answer_goes_on_at_a_driver_that_is_silent_for_half_a_minute",
         "mesh/membership/test_simulation.py::"
         "test_nobody_is_given_up_on_machines_that_are_starved_and_they_agree_soon_afterwards"),
    ),
    "F8": FaultClass(
        "the peer that owns the ring dies",
        ("faults/test_not_in_the_ring.py::"
         "test_the_death_of_the_owner_of_a_ring_that_has_no_stage_of_it_costs_no_token",
         "node/test_faults.py::test_an_open_ring_outlives_the_node_that_placed_it"),
    ),
    "F9": FaultClass(
        "the mesh is cut in half",
        (f"{_LINKS}::test_a_mesh_cut_in_half_serves_on_both_sides_and_is_one_again",
         "mesh/discovery/test_partition_netns.py::test_two_and_two_are_one_again",
         "rings/placing/test_order.py::test_a_mesh_split_in_two_places_on_both_sides_and_heals_to_one_instance"),
    ),
    "F10": FaultClass(
        "processes without a parent",
        (f"{_ENGINE}::test_runners_end_with_a_killed_node_which_can_be_started_again_where_it_was",
         "node/test_faults.py::test_no_runner_outlives_its_killed_node"),
    ),
    "F11": FaultClass(
        "an engine dies each time",
        ("node/test_faults.py::test_an_engine_that_cannot_load_is_a_typed_error_and_leaves_nothing",
         "rings/hosting/test_crash_loops.py::test_a_model_whose_runner_always_crashes_is_given_up_with_the_cause",
         "rings/hosting/test_crash_loops.py::test_after_three_crashes_it_is_placed_on_another_peer",
         "rings/hosting/test_guard.py::test_three_crashes_within_a_minute_open_the_breaker_once"),
    ),
    "F12": FaultClass(
        "memory is gone when it is requested",
        ("rings/placing/test_placing.py::"
         "test_a_peer_whose_memory_is_gone_since_it_was_last_heard_refuses_and_the_plan_is_solved_again",
         "rings/placing/test_order.py::test_of_two_peers_that_place_the_last_memory_one_wins_and_the_other_gets_numbers"),
    ),
    "F13": FaultClass(
        "memory runs out during answers",
        (f"{_AROUND}::test_a_runner_that_the_kernel_kills_for_memory_is_replaced",
         "rings/runner/test_scheduler.py::test_when_the_running_outgrow_the_pool_the_youngest_waits_and_is_computed_anew",
         "rings/runner/test_scheduler.py::"
         "test_a_machine_short_of_memory_first_gets_nobody_new_then_loses_the_youngest_then_refuses"),
    ),
    "F14": FaultClass(
        "memory that a dead process keeps",
        ("machine/test_accelerators.py::test_a_driver_that_stops_answering_leaves_nothing_free",),
        "macOS's wired memory is not read",
    ),
    "F15": FaultClass(
        "a download stalls, fails or is corrupt",
        (
            "models/fetcher/test_download.py::test_a_chunk_goes_on_at_the_next_source_from_where_the_first_stopped",
            "models/fetcher/test_hub.py::test_a_file_that_stays_corrupted_is_an_error_and_gets_no_name",
            "models/fetcher/test_interrupted.py::test_a_killed_fetcher_leaves_what_the_next_one_goes_on_with",
        ),
    ),
    "F16": FaultClass("the disk is full", (f"{_AROUND}::test_a_full_disk_stops_no_answer_and_takes_no_request_away",
         "machine/test_disk.py::test_a_node_serves_on_a_full_disk_says_so_and_recovers")),
    "F17": FaultClass(
        "a client does not read",
        ("meshes/test_serving.py::test_who_reads_nothing_is_parked_and_the_others_are_served",
         "api/openai/test_chat.py::test_a_client_that_stops_reading_loses_its_stream",
         "meshes/test_slow_reader.py::test_the_fast_keep_their_pace_and_memory_stays_flat"),
    ),
    "F18": FaultClass(
        "clients walk away",
        ("meshes/test_serving.py::test_two_hundred_that_walk_away_leave_nothing_behind",
         "meshes/test_lifecycle.py::test_a_client_that_vanishes_frees_the_ring",
         "meshes/test_abandoned.py::test_two_hundred_hang_up_while_the_model_loads_and_the_next_is_served"),
    ),
    "F19": FaultClass(
        "frames come twice, late or not",
        ("wire/test_ring_hop.py::test_a_break_loses_and_doubles_nothing",
         "wire/test_ring_hop.py::test_garbage_ends_its_own_stream_only",
         "rings/serving/test_journal.py::test_repeats_are_dropped_and_gaps_are_an_error"),
    ),
    "F20": FaultClass(
        "something takes too long",
        ("rings/serving/test_time_limit.py::test_an_answer_under_way_ends_where_it_is_and_its_stage_forgets_it",
         "rings/serving/test_time_limit.py::test_without_a_token_it_is_an_error",
         "api/openai/test_chat.py::test_comments_say_what_is_waited_for",
         "meshes/test_limits.py::test_prefill_that_makes_no_progress_is_a_deadline",
         "meshes/test_limits.py::test_silence_between_tokens_is_a_lost_stage"),
    ),
    "F21": FaultClass(
        "input that nobody should send",
        ("meshes/test_bad_input.py::test_random_messages_to_every_grpc_method",
         "api/openai/test_refusals.py::test_no_input_is_a_5xx"),
    ),
    "F22": FaultClass(
        "stages that compute a little differently",
        (f"{_ENGINE}::test_stages_that_differ_a_little_stay_in_step",
         "models/test_mixed_ring_test.py::test_engines_that_differ_are_refused_with_the_measured_difference"),
    ),
    "F23": FaultClass(
        "reading the machine's state fails",
        ("machine/test_accelerators.py::test_a_tool_that_is_not_there_fails_or_hangs_says_nothing",
         "machine/test_pressure.py::test_a_reading_that_fails_does_not_end_the_readings"),
    ),
    "F24": FaultClass(
        "the wrong one of several addresses",
        ("mesh/membership/test_paths.py::test_the_way_with_the_short_round_trip_is_used_and_shown",
         "mesh/discovery/test_netns.py::test_a_peer_with_two_paths_stays_when_one_goes",
         "rings/hosting/test_hops.py::test_a_better_way_is_used_at_the_next_dial_and_not_before",
         "wire/test_channels.py::test_the_proxy_for_the_web_is_not_in_the_way_to_a_peer"),
    ),
    "F25": FaultClass(
        "two versions in one mesh",
        ("mesh/membership/test_service.py::test_other_namespaces_and_protocols_are_refused_with_the_reason",
         "machine/test_this_machine.py::test_a_peer_of_an_older_version_has_one_engine_for_every_model",
         "faults/test_rolling_upgrade.py::test_no_request_fails_while_three_nodes_are_upgraded",
         "meshes/test_newer_peer.py::test_a_ring_over_both_answers_and_an_old_driver_refuses_one_request",
         "meshes/test_newer_peer.py::test_old_stages_refuse_the_operation_of_a_newer_driver_for_its_request_only"),
    ),
    "F26": FaultClass(
        "state that only grows",
        ("mesh/discovery/test_ways.py::test_twenty_restarts_leave_no_ghost",
         "mesh/membership/test_swim.py::test_the_gone_are_remembered_for_a_while_and_never_too_many",
         "faults/test_soak.py::test_two_minutes_of_random_faults"),
    ),
}  # fmt: skip
