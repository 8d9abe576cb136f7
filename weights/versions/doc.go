// Package versions decides which versions of a model's weights there are: who publishes them, when they are complete, who may take
// what from whom, and when their memory ends. It is pure: requests and news of members go in, and effects come out (answers,
// requests to publishers, news).
//
//	           Begin, by the first rank             Publish, by the last rank
//	(nothing) ──────────────────────► publishing ──────────────────────────► complete ──► dropped: a newer one is complete, and no
//	                                      │                                     │         receiver takes it
//	                                      └── a publisher is lost, or a newer   └── a publisher ends: lost
//	                                          version is complete: dropped
//
// A State has the versions of one name. All of it but the number of the epoch can be restored from what members say.
package versions
