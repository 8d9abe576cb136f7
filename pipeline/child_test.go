package pipeline_test

func childIfAsked() {}
